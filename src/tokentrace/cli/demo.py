"""``tokentrace demo``."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import debug_option

if TYPE_CHECKING:
    from ..renderer import Renderer


@click.command(short_help="Render the shipped example and write a report.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("tokentrace-demo.html"),
    show_default=True,
    help="Where the HTML report goes.",
)
@click.option("--open", "open_", is_flag=True, help="Show the report in a browser.")
@debug_option
def demo(*, output: Path, open_: bool) -> None:
    """Render the shipped example with the embedded pocket model, show it, and write an HTML report."""
    from ..pocket import EXAMPLE, POCKET
    from ..renderer import create_renderer
    from ..show.html import html_page
    from .inputs import read_conversation
    from .render import write

    messages, tools = read_conversation(str(EXAMPLE))
    renderer = create_renderer(POCKET)
    rendered = renderer.render(messages, tools=tools, add_generation_prompt=True)
    write(rendered, "text", None, title="demo")
    output.write_text(html_page(rendered, "tokentrace demo"), encoding="utf-8")

    sampled = int(rendered.mask.sum())
    ends = {rendered.decode(slice(turn.stop - 1, turn.stop)) for turn in rendered.turns if turn.stop_token}
    forged = rendered.select(role="user", field="content")
    pattern = renderer.tokenizer.vocabulary.control_pattern
    typed = pattern.findall(rendered.decode(forged)) if pattern else []
    made = int(rendered.control[forged].sum())
    click.echo()
    click.secho("What to notice", bold=True)
    click.echo(
        f"- {sampled} of {len(rendered)} tokens are sampled: what the assistant wrote, each turn with its "
        f"{' and '.join(sorted(ends))}.\n"
        "  The prompt that asks for a turn is not, nor is anything that system, users and tools said.\n"
        f"- In message 8 the user typed {' '.join(typed)}. It stayed text: {made} control tokens came of it.\n"
        "- Reasoning of earlier turns is still there: what was sampled once is never written anew."
    )
    _show_next_turn(renderer, messages, tools)
    click.secho(f"\nReport: {output}", bold=True)
    if open_:
        click.launch(str(output))


def _show_next_turn(renderer: Renderer, messages: list[dict[str, Any]], tools: Any) -> None:
    """One step of a rollout, gone on with in both ways: rendered again, and bridged."""
    from ..trajectory.breaks import explain_break

    called = next(at for at, message in enumerate(messages) if message.get("tool_calls"))
    prompt = renderer.render_ids(messages[:called], tools=tools, add_generation_prompt=True)
    whole = renderer.render(messages[: called + 1], tools=tools)
    canonical = whole.ids[whole.turns[-1].start : whole.turns[-1].stop].tolist()
    sampled = _sampled_otherwise(renderer, canonical)
    results = list(itertools.takewhile(lambda message: message["role"] == "tool", messages[called + 1 :]))
    again = renderer.render_ids([*messages[: called + 1], *results], tools=tools, add_generation_prompt=True)
    found = explain_break(prompt + sampled, again, renderer)
    bridged = renderer.bridge_to_next_turn(prompt, sampled, results, tools=tools)
    click.echo()
    click.secho("The next turn", bold=True)
    click.echo(
        f"An engine sampled message {called}, a word of it in other tokens than the tokenizer would have chosen, as "
        "engines do.\nA client that keeps messages renders them again:\n"
    )
    click.echo("\n".join(f"  {line}" for line in str(found or "no break").splitlines()))
    if bridged is not None:
        click.echo(
            f"\nThe bridge keeps all {bridged.stream_length} ids of the stream and adds {len(bridged.new_ids)}: "
            f"{renderer.tokenizer.decode(bridged.new_ids)!r}"
        )


def _sampled_otherwise(renderer: Renderer, ids: list[int]) -> list[int]:
    """The same text with its longest word spelled letter by letter."""
    texts = [renderer.tokenizer.decode([index]) for index in ids]
    longest = max(range(len(ids)), key=lambda at: len(texts[at]) if texts[at].strip().isalpha() else 0)
    letters = [int(index) for letter in texts[longest] for index in renderer.tokenizer.encode(letter)]
    return [*ids[:longest], *letters, *ids[longest + 1 :]]
