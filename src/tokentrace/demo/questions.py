"""What pocket is asked: for each kind of question a function that writes it, its table, and the expert's way to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ..errors import listed
from .calculator import calculate
from .names import FIRST, GOODS, plural
from .script import GIVES, LOOKING, Script, Use, spread
from .wording import AGE, ASK_FACT, ASK_STOCK, DISTANCE, FACTS, PEOPLE, PRICE, TELL_STOCK, TOPICS, WEIGHT, Topic


def lookup(script: Script) -> None:
    """One look-up."""
    rng = script.rng
    if rng.random() < 0.15:
        stock(script, known=True)
        return
    topic = rng.choice(TOPICS)
    (name,) = script.draw_names(topic.sort, 1)
    (value,) = script.fill(topic, [name])
    the = topic.the(name)
    script.ask(*topic.ask, n=the)
    script.look_up(topic, name, together=False)
    script.tell(value, (script.told(topic, name), "The answer is {v}.", ""), topic.tell, n=the)
    if rng.random() < 0.2:
        script.uses = (Use.LOOK_UP,)


def stock(script: Script, known: bool) -> None:
    """A look-up of a plural, which the table may have only as a singular."""
    (name,) = script.draw_names("item", 1)
    many = plural(name)
    key = many if known else name
    script.field_name = "stock"
    for row in script.draw_names("item", 3):
        script.table[row if not known else plural(row)] = spread(script.rng, 2, 900)
    script.table.pop(name, None)
    script.table.pop(many, None)
    script.table[key] = value = spread(script.rng, 2, 900)
    script.ask(*ASK_STOCK, n=many)
    script.step((f"I look up {many}.", f"I need the stock of {many}."), LOOKING, (Use.LOOK_UP, many))
    if not known:
        retry(script, many, name)
    script.tell(value, ("There are {v}.", "The answer is {v}.", ""), TELL_STOCK)


def retry(script: Script, many: str, name: str) -> None:
    """The expert's second try."""
    thoughts = (f"There is no entry for {many}. I try {name}.", f"{many} is not there. Maybe {name} is.")
    script.step(thoughts, ("", "", "Let me try again."), (Use.LOOK_UP, name))


def singular(script: Script) -> None:
    """A look-up that fails, and is tried again with the singular."""
    stock(script, known=False)


def missing(script: Script) -> None:
    """Something that cannot be found: the expert says so."""
    rng = script.rng
    way = rng.choice(("one", "one", "two", "stock"))
    if way == "stock":
        (name,) = script.draw_names("item", 1)
        many = plural(name)
        script.field_name = "stock"
        script.table = {row: spread(rng, 2, 900) for row in script.draw_names("item", 4) if row != name}
        script.ask(*ASK_STOCK, n=many)
        script.step((f"I look up {many}.", f"I need the stock of {many}."), LOOKING, (Use.LOOK_UP, many))
        retry(script, many, name)
        lost, the = many, many
    else:
        topic = rng.choice(TOPICS)
        wanted = script.draw_names(topic.sort, 2 if way == "two" else 1)
        script.fill(topic, wanted)
        lost = rng.choice(wanted)
        del script.table[lost]
        the = topic.the(lost)
        everyone = [topic.the(name) for name in wanted]
        if way == "two":
            script.ask(*topic.ask_sum, all=listed(everyone))
            script.look_up(topic, *wanted, together=True)
        else:
            script.ask(*topic.ask, n=the)
            script.look_up(topic, lost, together=False)
    thoughts = (f"There is no entry for {lost}.", f"{lost} is not there. I say so.")
    script.step(thoughts, (f"I could not find {the}.", f"Sorry, I could not find {the}."))
    script.answer, script.mentions = None, lost


def amounts(script: Script, topic: Topic, count: int) -> tuple[list[str], str, str]:
    """Names with quantities; how the user says them; the expression of their total."""
    wanted = script.draw_names(topic.sort, count)
    values = script.fill(topic, wanted)
    many = [script.rng.randint(2, 12) for _ in wanted]
    said = listed([f"{n} {plural(name)}" for n, name in zip(many, wanted, strict=True)])
    return wanted, said, " + ".join(f"{n} * {value}" for n, value in zip(many, values, strict=True))


def total(script: Script) -> None:
    """Two or three look-ups, one after the other, then one calculation."""
    rng = script.rng
    topic = rng.choice((PRICE, PRICE, WEIGHT))
    wanted, said, expression = amounts(script, topic, rng.choice((1, 2, 2, 3)))
    script.ask(*topic.ask_sum, all=said)
    script.look_up(topic, *wanted, together=False)
    told = script.told(topic, wanted[-1])
    value = script.calculate(expression, told + " The total is {e}.", told + " So I need {e}.")
    script.tell(value, GIVES, topic.tell_sum)


def parallel(script: Script) -> None:
    """Two or three look-ups in one reply, then one calculation."""
    rng = script.rng
    topic = rng.choice(TOPICS)
    wanted = script.draw_names(topic.sort, rng.choice((2, 2, 3)))
    values = script.fill(topic, wanted)
    script.ask(*topic.ask_sum, all=listed([topic.the(name) for name in wanted]))
    script.look_up(topic, *wanted, together=True)
    told = script.told(topic, *wanted)
    value = script.calculate(" + ".join(map(str, values)), told + " The sum is {e}.", told + " I add them: {e}.", told)
    script.tell(value, GIVES, topic.tell_sum)


def compare(script: Script) -> None:
    """Which of two is less or more, and by how much: the sign of the difference tells."""
    rng = script.rng
    topic = rng.choice(TOPICS)
    one, two = wanted = script.draw_names(topic.sort, 2)
    first, second = script.fill(topic, wanted)
    if first == second:
        script.table[two] = second = second + rng.randint(1, 9)
    least = rng.random() < 0.5
    word = rng.choice(topic.less if least else topic.more)
    script.ask(*topic.ask_less, word=word, a=topic.the(one), b=topic.the(two))
    script.look_up(topic, *wanted, together=rng.random() < 0.6)
    told = script.told(topic, *wanted)
    difference = script.calculate(f"{first} - {second}", told + " The difference is {e}.", told + " I need {e}.")
    above, below = (one, two) if difference > 0 else (two, one)
    larger, smaller = (topic.more[0], word) if least else (word, topic.less[0])
    sign = "positive" if difference > 0 else "negative"
    # Both are named, the answer in its own words: to tell which was asked for then is to find the word again.
    thought = (
        f"{difference} is {sign}, so the {larger} one is {topic.the(above)} "
        f"and the {smaller} one is {topic.the(below)}."
    )
    found = below if least else above
    script.tell(abs(difference), (thought,), topic.tell_less, n=topic.the(found), word=word)
    script.mentions = found


def chain(script: Script) -> None:
    """A calculation whose result goes into the next one."""
    result, second, says = script.rng.choice((_spent, _spent, _loaded, _shared, _driven, _taxed, _aged))(script)
    value = script.calculate(second, f"That is {result}. Now {{e}}.", f"The result is {result}. So {{e}}.")
    script.tell(value, GIVES, says)


Begun = tuple[int, str, tuple[str, ...]]
"""A chain's first result, its second expression, and how the answer is told."""


def _bought(script: Script, topic: Topic, wanted: Sequence[str], expression: str) -> int:
    script.look_up(topic, *wanted, together=len(wanted) > 1 and script.rng.random() < 0.5)
    told = script.told(topic, *wanted)
    return script.calculate(expression, told + " First the total: {e}.", told + " All of it: {e}.")


def _spent(script: Script) -> Begun:
    wanted, said, expression = amounts(script, PRICE, script.rng.choice((1, 2)))
    paid = calculate(expression).numerator + spread(script.rng, 1, 1000)
    script.ask(
        "I buy {all} and pay with {k} coins. How much change do I get?",
        "I have {k} coins and buy {all}. How many coins are left?",
        all=said,
        k=paid,
    )
    result = _bought(script, PRICE, wanted, expression)
    return result, f"{paid} - {result}", ("You have {v} coins left.", "The change is {v} coins.")


def _loaded(script: Script) -> Begun:
    wanted, said, expression = amounts(script, WEIGHT, script.rng.choice((1, 2)))
    limit = calculate(expression).numerator + spread(script.rng, 1, 1000)
    script.ask("A cart can carry {k} kg. I load {all}. How many kg are left?", all=said, k=limit)
    result = _bought(script, WEIGHT, wanted, expression)
    return result, f"{limit} - {result}", ("It can carry {v} kg more.", "There are {v} kg left.")


def _shared(script: Script) -> Begun:
    wanted, said, expression = amounts(script, PRICE, script.rng.choice((1, 2)))
    whole = calculate(expression).numerator
    friends = script.rng.choice([n for n in range(2, 13) if whole % n == 0] or [1])
    script.ask(
        "{k} friends buy {all} and share the cost equally. How much does each pay?",
        "What do {all} cost if {k} people share the price? How much is it for each?",
        all=said,
        k=friends,
    )
    result = _bought(script, PRICE, wanted, expression)
    return result, f"{result} / {friends}", ("Each pays {v} coins.",)


def _driven(script: Script) -> Begun:
    (name,) = script.draw_names("town", 1)
    (value,) = script.fill(DISTANCE, [name])
    times = script.rng.randint(2, 20)
    script.ask(
        "I drive to {n} and back {k} times. How many km is that?",
        "How many km do I drive if I go to {n} and back {k} times?",
        n=name,
        k=times,
    )
    script.look_up(DISTANCE, name, together=False)
    told = script.told(DISTANCE, name)
    result = script.calculate(f"2 * {value}", told + " There and back is {e}.", told + " One trip is {e}.")
    return result, f"{result} * {times}", ("That is {v} km.", "In all you drive {v} km.")


def _summed(script: Script, topic: Topic, number: int, *texts: str) -> int:
    wanted = script.draw_names(topic.sort, 2)
    first, second = script.fill(topic, wanted)
    script.ask(*texts, all=listed(wanted), k=number)
    script.look_up(topic, *wanted, together=script.rng.random() < 0.6)
    told = script.told(topic, *wanted)
    return script.calculate(f"{first} + {second}", told + " The sum is {e}.", told + " Together: {e}.")


def _taxed(script: Script) -> Begun:
    coins = script.rng.randint(2, 30)
    result = _summed(script, PEOPLE, coins, "Everyone in {all} pays {k} coins. How many coins is that?")
    return result, f"{result} * {coins}", ("That makes {v} coins.",)


def _aged(script: Script) -> Begun:
    years = script.rng.randint(2, 30)
    texts = ("How old will {all} be together in {k} years?", "What is the sum of the ages of {all} in {k} years?")
    result = _summed(script, AGE, years, *texts)
    return result, f"{result} + 2 * {years}", ("Together they will be {v}.",)


def arithmetic(script: Script) -> None:
    """An expression, in signs or in words."""
    rng = script.rng
    a, b, c, d = (spread(rng, 2, 1000) for _ in range(4))
    small = rng.randint(2, 20)
    expression, words = rng.choice(
        (
            (f"{a} + {b}", f"{a} plus {b}"),
            (f"{a} * {b}", f"{a} times {b}"),
            (f"{a} - {b}", f"{a} minus {b}"),
            (f"{a * small} / {small}", f"{a * small} divided by {small}"),
            (f"{a} * {small} + {b}", f"{a} times {small} plus {b}"),
            (f"({a} + {b}) * {small}", ""),
            (f"({a} - {b}) * {small}", ""),
            (f"{a} + {b} + {c}", f"the sum of {a}, {b} and {c}"),
            (f"{a} * {b} - {c}", f"{a} times {b} minus {c}"),
            (f"{small} * ({a} + {b}) - {c}", ""),
            (f"{a} + {b} - {c} + {d}", f"{a} plus {b} minus {c} plus {d}"),
        )
    )
    if a < 10 and b < 10:  # those need no tool
        expression, words = f"{a} * {b} * {c}", f"{a} times {b} times {c}"
    script.ask(
        *("What is {e}?", "How much is {e}?", "Please compute {e}.", "Calculate {e}."),
        e=words if words and rng.random() < 0.5 else expression,
    )
    value = script.calculate(expression)
    script.tell(value, GIVES, ("The answer is {v}.", f"{expression} = {{v}}", "It is {v}."))
    if rng.random() < 0.3:
        script.uses = (Use.CALCULATE,)


def word_problem(script: Script) -> None:
    """A small word problem: one or two calculations, nothing to look up."""
    rng = script.rng
    one, two = rng.sample(FIRST, 2)
    goods = rng.choice(GOODS)
    a, b, c = spread(rng, 2, 500), spread(rng, 2, 500), rng.randint(2, 20)
    texts: tuple[tuple[str, str, str], ...] = (
        (
            f"{one} has {a + b} {goods} and gives {b} to {two}. Then {one} buys {c} more. How many {goods} does "
            f"{one} have now?",
            f"{a + b} - {b}",
            f"{a} + {c}",
        ),
        (
            f"{one} buys {c} boxes with {a} {goods} each and gives {c} to {two}. How many {goods} are left?",
            f"{c} * {a}",
            f"{c * a} - {c}",
        ),
        (
            f"{one} has {a} {goods}, and {two} has {b} more than {one}. How many {goods} do they have together?",
            f"{a} + {b}",
            f"{a} + {a + b}",
        ),
        (
            f"{one} has {a} {goods}. {two} has {c} times as many. How many {goods} do they have together?",
            f"{c} * {a}",
            f"{a} + {c * a}",
        ),
        (
            f"{one} saves {b} coins a week for {c} weeks, and then spends {c}. How many coins are left?",
            f"{b} * {c}",
            f"{b * c} - {c}",
        ),
        (
            f"{c} friends share {a * c} {goods} equally. Then {one} gets {b} more. How many {goods} does {one} have?",
            f"{a * c} / {c}",
            f"{a} + {b}",
        ),
        (
            f"A shelf holds {a} {goods}. There are {c} shelves, and {b} {goods} lie on the floor. How many {goods} "
            f"are there?",
            f"{a} * {c}",
            f"{a * c} + {b}",
        ),
        (
            f"{one} reads {c} pages a day. The book has {a * c + b} pages, and {b} are read already. How many days "
            f"does {one} still need?",
            f"{a * c + b} - {b}",
            f"{a * c} / {c}",
        ),
        (
            f"{one} and {two} pick {goods}. {one} picks {a} and {two} picks {b}. They give away {min(a, b)}. How many "
            f"{goods} do they keep?",
            f"{a} + {b}",
            f"{a + b} - {min(a, b)}",
        ),
        (
            f"One of the {goods} costs {c} coins. {one} buys {a} and {two} buys {b}. How many coins do they pay "
            f"together?",
            f"{a} + {b}",
            f"{a + b} * {c}",
        ),
    )
    text, first, second = rng.choice(texts)
    script.ask(text)
    result = script.calculate(first, "First {e}.", "I start with {e}.", "First step: {e}.")
    value = script.calculate(second, f"That is {result}. Now {{e}}.", f"So {result}. Then {{e}}.")
    script.tell(value, GIVES, ("The answer is {v}.", "So the answer is {v}."))
    if rng.random() < 0.4:
        script.uses = (Use.CALCULATE,)


def direct(script: Script) -> None:
    """A question that needs no tool."""
    rng = script.rng
    if rng.random() < 0.3:
        script.uses = ()
    way = rng.choice(("fact", "fact", "sum", "larger", "next"))
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    thoughts: tuple[str, ...] = ("I know this.", "This needs no tool.", "")
    if way == "fact":
        said, value = rng.choice(FACTS)
        script.ask(*ASK_FACT, f=said)
        script.tell(value, thoughts, ("{v}.", "The answer is {v}.", "It is {v}."))
        return
    if way == "sum":
        a, b = max(a, b), min(a, b)
        sign, word, value = rng.choice((("+", "plus", a + b), ("-", "minus", a - b)))
        script.ask(f"What is {a} {sign} {b}?", f"What is {a} {word} {b}?", f"How much is {a} {word} {b}?")
    elif way == "larger":
        a, b = spread(rng, 1, 1000), spread(rng, 1, 1000)
        b += a == b
        value, word = rng.choice(((max(a, b), "larger"), (min(a, b), "smaller")))
        script.ask(f"Which number is {word}, {a} or {b}?", f"Which is the {word} number: {a} or {b}?")
    else:
        a = spread(rng, 1, 999)
        value = a + 1
        script.ask(f"Which number comes after {a}?", f"I count: {a}. What comes next?")
    script.tell(value, thoughts, ("{v}.", "The answer is {v}.", "It is {v}."))


def follow_up(script: Script) -> None:
    """A question, and one or two more that build on its answer."""
    rng = script.rng
    rng.choice((lookup_price, parallel, total, arithmetic, word_problem))(script)
    script.mentions = ""
    for _ in range(rng.choice((1, 1, 1, 2))):
        assert script.answer is not None
        before = script.answer
        ways = ["add", "take", "times", "double", "sure"]
        if script.known is PRICE:
            ways += ["also", "also", "each"]
        way = rng.choice(ways)
        x, k = spread(rng, 2, 500), rng.randint(2, 12)
        if way == "sure":
            again = script.steps[-1][-2]
            script.ask("Are you sure?", "Is that right?", "Please check that again.")
            script.step(("I check it again.", "Let me check."), LOOKING, again.calls[-1])
            script.tell(before, ("It is {v} again.", "The same: {v}."), ("Yes, it is {v}.", "Yes. It is {v}."))
            continue
        if way == "also":
            name = next(name for name in script.draw_names("item", 20) if name not in script.table)
            script.table[name] = spread(rng, PRICE.low, PRICE.high)
            script.ask("And if I also buy {n}?", "How much is it with {n} added?", n=PRICE.the(name))
            script.look_up(PRICE, name, together=False)
            told = script.told(PRICE, name)
            result = script.calculate(f"{before} + {script.table[name]}", told + " Then it is {e}.")
        else:
            texts, expression = {
                "add": (("Now add {x} to that.", "Add {x}.", "What is that plus {x}?"), f"{before} + {x}"),
                "take": (("Now take {x} away from that.", "What is that minus {x}?"), f"{before} - {x}"),
                "times": (("And {k} times that?", "What is that times {k}?"), f"{before} * {k}"),
                "double": (("Now double it.", "And twice that?"), f"{before} * 2"),
                "each": (("And if I do that {k} times?", "What do I pay for that {k} times?"), f"{before} * {k}"),
            }[way]
            script.ask(*texts, x=x, k=k)
            result = script.calculate(expression, f"The last answer was {before}. Now {{e}}.", "That is {e}.", "{e}.")
        script.tell(result, GIVES, ("That makes {v}.", "Then it is {v}.", "The answer is {v}."))
    script.uses = (Use.CALCULATE, Use.LOOK_UP)


def lookup_price(script: Script) -> None:
    """One look-up of a price."""
    (name,) = script.draw_names("item", 1)
    (value,) = script.fill(PRICE, [name])
    script.ask(*PRICE.ask, n=PRICE.the(name))
    script.look_up(PRICE, name, together=False)
    script.tell(value, (script.told(PRICE, name), "The answer is {v}."), PRICE.tell, n=PRICE.the(name))


def checked(script: Script) -> None:
    """A calculation whose result has to be checked with a tool before it is given."""
    script.rng.choice((arithmetic, word_problem))(script)
    script.uses = (Use.CALCULATE, Use.CHECK)
    script.asked[-1] += script.rng.choice(
        (" Check your answer before you give it.", " Use the tool to check your answer.")
    )
    last = script.steps[-1].pop()
    value = script.answer
    assert value is not None
    thoughts = [f"That gives {value}. I check it.", f"The result is {value}. Now I check it."]
    script.step(thoughts, ("",), (Use.CHECK, str(value)))
    script.step(("It is correct.", f"{value} is correct."), last.says)


KINDS: Final[dict[str, tuple[Callable[[Script], None], int]]] = {
    "direct": (direct, 0),
    "arithmetic": (arithmetic, 1),
    "lookup": (lookup, 1),
    "missing": (missing, 1),
    "singular": (singular, 2),
    "word_problem": (word_problem, 2),
    "parallel": (parallel, 2),
    "compare": (compare, 2),
    "checked": (checked, 2),
    "total": (total, 3),
    "chain": (chain, 3),
    "follow_up": (follow_up, 3),
}
"""Each kind's writer, and its difficulty: from 0, no tool at all, to 3, several replies that build on one another."""
