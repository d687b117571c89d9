"""The kinds of questions: for each, a function that writes the question, its table and the expert's solution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tokentrace.demo.calculator import calculate
from tokentrace.show.visible import listed
from training.pocket.purpose import Purpose
from training.pocket.script import GIVES, LOOKING, Script, spread
from training.pocket.words import TOPICS, WORDS, Topic, plural, words

PRICE: Final = TOPICS["price"]


def lookup(script: Script) -> None:
    """One look-up."""
    rng = script.rng
    if rng.random() < 0.15:
        stock(script, has_plural=True)
        return
    topic = rng.choice(list(TOPICS.values()))
    (name,) = script.draw_names(topic.sort, 1)
    (value,) = script.fill(topic, [name])
    the = topic.the(name)
    script.ask(*topic.ask, n=the)
    script.look_up(topic, name, together=False)
    script.tell(value, (script.facts(topic, name), "The answer is {v}.", ""), topic.tell, n=the)
    if rng.random() < 0.2:
        script.uses = (Purpose.LOOK_UP,)


def stock(script: Script, has_plural: bool) -> None:
    """A look-up of a plural; the table has the plural if `has_plural`, else only the singular."""
    (name,) = script.draw_names("item", 1)
    many = plural(name)
    key = many if has_plural else name
    script.field_name = "stock"
    for row in script.draw_names("item", 3):
        script.table[row if not has_plural else plural(row)] = spread(script.rng, 2, 900)
    script.table.pop(name, None)
    script.table.pop(many, None)
    script.table[key] = value = spread(script.rng, 2, 900)
    script.ask(*WORDS["stock"]["ask"], n=many)
    script.step((f"I look up {many}.", f"I need the stock of {many}."), LOOKING, (Purpose.LOOK_UP, many))
    if not has_plural:
        retry(script, many, name)
    script.tell(value, ("There are {v}.", "The answer is {v}.", ""), WORDS["stock"]["tell"])


def retry(script: Script, many: str, name: str) -> None:
    """The expert's second attempt, with the singular."""
    thoughts = (f"There is no entry for {many}. I try {name}.", f"{many} is not there. Maybe {name} is.")
    script.step(thoughts, ("", "", "Let me try again."), (Purpose.LOOK_UP, name))


def singular(script: Script) -> None:
    """A look-up that fails with the plural and succeeds with the singular."""
    stock(script, has_plural=False)


def missing(script: Script) -> None:
    """A look-up of a missing entry: the expert reports that."""
    rng = script.rng
    way = rng.choice(("one", "one", "two", "stock"))
    if way == "stock":
        (name,) = script.draw_names("item", 1)
        many = plural(name)
        script.field_name = "stock"
        script.table = {row: spread(rng, 2, 900) for row in script.draw_names("item", 4) if row != name}
        script.ask(*WORDS["stock"]["ask"], n=many)
        script.step((f"I look up {many}.", f"I need the stock of {many}."), LOOKING, (Purpose.LOOK_UP, many))
        retry(script, many, name)
        absent, the = many, many
    else:
        topic = rng.choice(list(TOPICS.values()))
        names = script.draw_names(topic.sort, 2 if way == "two" else 1)
        script.fill(topic, names)
        absent = rng.choice(names)
        del script.table[absent]
        the = topic.the(absent)
        phrases = [topic.the(name) for name in names]
        if way == "two":
            script.ask(*topic.ask_sum, all=listed(phrases))
            script.look_up(topic, *names, together=True)
        else:
            script.ask(*topic.ask, n=the)
            script.look_up(topic, absent, together=False)
    thoughts = (f"There is no entry for {absent}.", f"{absent} is not there. I say so.")
    script.step(thoughts, (f"I could not find {the}.", f"Sorry, I could not find {the}."))
    script.answer, script.mentions = None, absent


def amounts(script: Script, topic: Topic, count: int) -> tuple[list[str], str, str]:
    """Names, the user's wording of them with quantities, and the expression of their total."""
    names = script.draw_names(topic.sort, count)
    values = script.fill(topic, names)
    counts = [script.rng.randint(2, 12) for _ in names]
    phrase = listed([f"{n} {plural(name)}" for n, name in zip(counts, names, strict=True)])
    return names, phrase, " + ".join(f"{n} * {value}" for n, value in zip(counts, values, strict=True))


def total(script: Script) -> None:
    """Two or three look-ups, one after the other, then one calculation."""
    rng = script.rng
    topic = rng.choice((PRICE, PRICE, TOPICS["weight"]))
    names, phrase, expression = amounts(script, topic, rng.choice((1, 2, 2, 3)))
    script.ask(*topic.ask_sum, all=phrase)
    script.look_up(topic, *names, together=False)
    fact = script.facts(topic, names[-1])
    value = script.calculate(expression, fact + " The total is {e}.", fact + " So I need {e}.")
    script.tell(value, GIVES, topic.tell_sum)


def parallel(script: Script) -> None:
    """Two or three look-ups in one reply, then one calculation."""
    rng = script.rng
    topic = rng.choice(list(TOPICS.values()))
    names = script.draw_names(topic.sort, rng.choice((2, 2, 3)))
    values = script.fill(topic, names)
    script.ask(*topic.ask_sum, all=listed([topic.the(name) for name in names]))
    script.look_up(topic, *names, together=True)
    fact = script.facts(topic, *names)
    value = script.calculate(" + ".join(map(str, values)), fact + " The sum is {e}.", fact + " I add them: {e}.", fact)
    script.tell(value, GIVES, topic.tell_sum)


def compare(script: Script) -> None:
    """Which of two is less or more, and by how much: the sign of the difference decides."""
    rng = script.rng
    topic = rng.choice(list(TOPICS.values()))
    one, two = names = script.draw_names(topic.sort, 2)
    first, second = script.fill(topic, names)
    if first == second:
        script.table[two] = second = second + rng.randint(1, 9)
    least = rng.random() < 0.5
    word = rng.choice(topic.less if least else topic.more)
    script.ask(*topic.ask_less, word=word, a=topic.the(one), b=topic.the(two))
    script.look_up(topic, *names, together=rng.random() < 0.6)
    fact = script.facts(topic, *names)
    difference = script.calculate(f"{first} - {second}", fact + " The difference is {e}.", fact + " I need {e}.")
    above, below = (one, two) if difference > 0 else (two, one)
    larger, smaller = (topic.more[0], word) if least else (word, topic.less[0])
    sign = "positive" if difference > 0 else "negative"
    # The thought names both with their words, so the answer is the one whose word the question used.
    thought = (
        f"{difference} is {sign}, so the {larger} one is {topic.the(above)} "
        f"and the {smaller} one is {topic.the(below)}."
    )
    chosen = below if least else above
    script.tell(abs(difference), (thought,), topic.tell_less, n=topic.the(chosen), word=word)
    script.mentions = chosen


def chain(script: Script) -> None:
    """A calculation whose result goes into the next one."""
    chains = WORDS["chains"]
    one = script.rng.choice([chains[0], *chains])  # the first is twice as likely
    result, number = {"bought": _bought, "driven": _driven, "summed": _summed}[one["kind"]](script, one)
    second = one["second"].format(result=result, k=number)
    value = script.calculate(second, f"That is {result}. Now {{e}}.", f"The result is {result}. So {{e}}.")
    script.tell(value, GIVES, one["tell"])


def _bought(script: Script, one: Mapping[str, Any]) -> tuple[int, int]:
    """The total of several things, and a number from the user."""
    rng, topic = script.rng, TOPICS[one["topic"]]
    names, phrase, expression = amounts(script, topic, rng.choice((1, 2)))
    whole = calculate(expression).numerator
    if one["shared"]:
        number = rng.choice([n for n in range(2, 13) if whole % n == 0] or [1])
    else:
        number = whole + spread(rng, 1, 1000)
    script.ask(*one["ask"], all=phrase, k=number)
    script.look_up(topic, *names, together=len(names) > 1 and rng.random() < 0.5)
    fact = script.facts(topic, *names)
    return script.calculate(expression, fact + " First the total: {e}.", fact + " All of it: {e}."), number


def _driven(script: Script, one: Mapping[str, Any]) -> tuple[int, int]:
    """The distance there and back, and the number of trips."""
    topic = TOPICS[one["topic"]]
    (name,) = script.draw_names(topic.sort, 1)
    (value,) = script.fill(topic, [name])
    times = script.rng.randint(2, 20)
    script.ask(*one["ask"], n=name, k=times)
    script.look_up(topic, name, together=False)
    fact = script.facts(topic, name)
    return script.calculate(f"2 * {value}", fact + " There and back is {e}.", fact + " One trip is {e}."), times


def _summed(script: Script, one: Mapping[str, Any]) -> tuple[int, int]:
    """The sum of two values, and a number from the user."""
    rng, topic = script.rng, TOPICS[one["topic"]]
    number = rng.randint(2, 30)
    names = script.draw_names(topic.sort, 2)
    first, second = script.fill(topic, names)
    script.ask(*one["ask"], all=listed(names), k=number)
    script.look_up(topic, *names, together=rng.random() < 0.6)
    fact = script.facts(topic, *names)
    return script.calculate(f"{first} + {second}", fact + " The sum is {e}.", fact + " Together: {e}."), number


def arithmetic(script: Script) -> None:
    """An expression, in symbols or in words."""
    rng = script.rng
    a, b, c, d = (spread(rng, 2, 1000) for _ in range(4))
    small = rng.randint(2, 20)
    values = {"a": a, "b": b, "c": c, "d": d, "small": small, "whole": a * small}
    signs, in_words = (text.format(**values) for text in rng.choice(WORDS["arithmetic"]["expressions"]))
    if a < 10 and b < 10:  # these would need no tool
        signs, in_words = f"{a} * {b} * {c}", f"{a} times {b} times {c}"
    script.ask(
        *("What is {e}?", "How much is {e}?", "Please compute {e}.", "Calculate {e}."),
        e=in_words if in_words and rng.random() < 0.5 else signs,
    )
    value = script.calculate(signs)
    script.tell(value, GIVES, ("The answer is {v}.", f"{signs} = {{v}}", "It is {v}."))
    if rng.random() < 0.3:
        script.uses = (Purpose.CALCULATE,)


def word_problem(script: Script) -> None:
    """A small word problem: one or two calculations, nothing to look up."""
    rng = script.rng
    one, two = rng.sample(words("first"), 2)
    goods = rng.choice(words("goods"))
    a, b, c = spread(rng, 2, 500), spread(rng, 2, 500), rng.randint(2, 20)
    sums = {"ab": a + b, "ac": a * c, "bc": b * c, "acb": a * c + b, "least": min(a, b)}
    values = {"one": one, "two": two, "goods": goods, "a": a, "b": b, "c": c, **sums}
    text, first, second = (part.format(**values) for part in rng.choice(WORDS["problems"]).values())
    script.ask(text)
    result = script.calculate(first, "First {e}.", "I start with {e}.", "First step: {e}.")
    value = script.calculate(second, f"That is {result}. Now {{e}}.", f"So {result}. Then {{e}}.")
    script.tell(value, GIVES, ("The answer is {v}.", "So the answer is {v}."))
    if rng.random() < 0.4:
        script.uses = (Purpose.CALCULATE,)


def direct(script: Script) -> None:
    """A question that needs no tool."""
    rng = script.rng
    if rng.random() < 0.3:
        script.uses = ()
    way = rng.choice(("fact", "fact", "sum", "larger", "next"))
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    thoughts: tuple[str, ...] = ("I know this.", "This needs no tool.", "")
    if way == "fact":
        fact, value = rng.choice(WORDS["facts"]["known"])
        script.ask(*WORDS["facts"]["ask"], f=fact)
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
    """A question and one or two follow-ups that build on its answer."""
    rng = script.rng
    rng.choice((lookup_price, parallel, total, arithmetic, word_problem))(script)
    script.mentions = ""
    for _ in range(rng.choice((1, 1, 1, 2))):
        assert script.answer is not None
        before = script.answer
        ways = ["add", "take", "times", "double", "sure"]
        if script.topic is PRICE:
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
            fact = script.facts(PRICE, name)
            result = script.calculate(f"{before} + {script.table[name]}", fact + " Then it is {e}.")
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
    script.uses = (Purpose.CALCULATE, Purpose.LOOK_UP)


def lookup_price(script: Script) -> None:
    """One look-up of a price."""
    (name,) = script.draw_names("item", 1)
    (value,) = script.fill(PRICE, [name])
    script.ask(*PRICE.ask, n=PRICE.the(name))
    script.look_up(PRICE, name, together=False)
    script.tell(value, (script.facts(PRICE, name), "The answer is {v}."), PRICE.tell, n=PRICE.the(name))


def checked(script: Script) -> None:
    """A calculation whose result must be checked with a tool before answering."""
    script.rng.choice((arithmetic, word_problem))(script)
    script.uses = (Purpose.CALCULATE, Purpose.CHECK)
    script.user_messages[-1] += script.rng.choice(
        (" Check your answer before you give it.", " Use the tool to check your answer.")
    )
    last = script.steps[-1].pop()
    value = script.answer
    assert value is not None
    thoughts = [f"That gives {value}. I check it.", f"The result is {value}. Now I check it."]
    script.step(thoughts, ("",), (Purpose.CHECK, str(value)))
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
