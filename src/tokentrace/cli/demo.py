"""``tokentrace demo``."""

from __future__ import annotations

from pathlib import Path

import click

from . import debug_option


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
    click.secho(f"\nReport: {output}", bold=True)
    if open_:
        click.launch(str(output))
