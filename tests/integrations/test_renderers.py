"""A tokentrace renderer created by renderers' own factory, and under renderers' own class names."""

import asyncio
import copy
from typing import Any

import pytest
import renderers
import renderers.base
import renderers.client

from tests.assets import family_dir
from tests.gateway.server import TOOLS, gateway_server
from tests.lazy import lazy
from tokentrace import create_renderer
from tokentrace.errors import InputError, RendererError
from tokentrace.integrations import renderers_compat
from tokentrace.integrations.renderers import TokentraceConfig, TokentraceRenderer
from tokentrace.pocket import POCKET
from tokentrace.tokens.kinds import Kind

transformers = lazy("transformers")

PATH = "tokentrace.integrations.renderers:TokentraceRenderer"
CALL = {"id": "call_1", "type": "function", "function": {"name": "compute", "arguments": {"formula": "6 * 7"}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Use the tool."},
    {"role": "user", "content": "What is 6 * 7?"},
    {"role": "assistant", "content": "", "reasoning_content": "A product.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    {"role": "assistant", "content": "It is 42."},
]


@pytest.fixture(scope="module")
def pocket() -> Any:
    """A transformers tokenizer, as renderers passes it."""
    return transformers.PreTrainedTokenizerFast.from_pretrained(POCKET)


@pytest.fixture(scope="module")
def qwen3() -> Any:
    """A tokenizer whose template drops past reasoning."""
    return transformers.PreTrainedTokenizerFast.from_pretrained(family_dir("qwen3"))


def custom(**fields: Any) -> Any:
    return renderers.CustomRendererConfig(import_path=PATH, **fields)


def test_renderers_creates_our_class_with_our_settings(pocket: Any) -> None:
    variables = {"enable_thinking": False}
    theirs = renderers.create_renderer(pocket, custom(preserve_all_thinking=True), chat_template_kwargs=variables)
    assert type(theirs) is TokentraceRenderer
    assert isinstance(theirs, renderers.Renderer)
    assert not renderers.base.is_multimodal(theirs)
    assert (theirs.renderer.past, theirs.renderer.template_kwargs) == ("preserve", variables)
    ours = create_renderer(POCKET, preserve_all_thinking=True, **variables)
    for options in ({"tools": TOOLS}, {"tools": TOOLS, "add_generation_prompt": True}):
        assert theirs.render_ids(CONVERSATION, **options) == ours.render_ids(CONVERSATION, **options)


def test_wrong_settings_are_refused(pocket: Any) -> None:
    with pytest.raises(ValueError, match="control_tokens"):
        custom(control_tokens="sometimes")
    with pytest.raises(RendererError, match="preserve_all_thinking"):
        renderers.create_renderer(pocket, custom(preserve_all_thinkin=True))
    with pytest.raises(ValueError, match="preserve_all_thinking"):  # a setting is not a template variable
        renderers.create_renderer(pocket, custom(), chat_template_kwargs={"preserve_all_thinking": True})


def test_rendered_tokens_have_our_data() -> None:
    adapter, ours = TokentraceRenderer(POCKET), create_renderer(POCKET)
    rendered, expected = adapter.render(CONVERSATION, tools=TOOLS), ours.render(CONVERSATION, tools=TOOLS)
    assert rendered.token_ids == expected.token_ids
    assert rendered.sampled_mask == expected.mask.tolist()
    assert rendered.message_indices == expected.message_indices
    assert rendered.message_roles == ["system", "user", "assistant", "tool", "assistant"]
    assert rendered.message_tool_names == [None, None, None, "compute", None]
    assert rendered.multi_modal_data is None
    text = {
        role: [ours.tokenizer.decode(rendered.token_ids[start:stop]) for start, stop in spans]
        for role, spans in rendered.content_token_spans_by_role().items()
    }
    assert (text["system"], text["user"], text["tool"]) == (["Use the tool."], ["What is 6 * 7?"], ["42"])
    assert text["assistant"][1] == "It is 42.<|end|>"
    assert text["assistant"][0].startswith("<think>\nA product.\n</think>")
    spans = rendered.message_token_spans()
    assert spans == sorted(spans)
    assert spans[0][0] <= 1  # the first token is the template's own
    assert spans[-1][1] == len(rendered.token_ids)
    assert rendered.tokens_by_role(sampled_only=True)["assistant"] == int(expected.mask.sum())
    sample = renderers.build_training_sample(adapter, CONVERSATION, tools=TOOLS)
    assert (sample.token_ids, sample.loss_mask) == (expected.token_ids, expected.mask.tolist())
    more = renderers.build_training_sample(adapter, CONVERSATION, tools=TOOLS, content_sft_roles={"tool"}).loss_mask
    ids = [id for id, one, other in zip(expected.token_ids, more, sample.loss_mask, strict=True) if one > other]
    assert ours.tokenizer.decode(ids) == "42"


def test_bridge_keeps_the_stream_and_indexes_the_new_messages() -> None:
    adapter = TokentraceRenderer(POCKET)
    prompt = adapter.render_ids(CONVERSATION[:2], tools=TOOLS, add_generation_prompt=True)
    completion = adapter.render_ids(CONVERSATION[:3], tools=TOOLS)[len(prompt) :]
    new = [CONVERSATION[3], {"role": "user", "content": "And 6 * 8?"}]
    bridged = adapter.bridge_to_next_turn(prompt, completion, new, tools=TOOLS)
    expected = adapter.renderer.bridge(prompt, completion, new, tools=TOOLS)
    assert bridged.token_ids == expected.token_ids
    before = len(prompt) + len(completion)
    assert bridged.token_ids[:before] == prompt + completion
    assert bridged.message_indices[:before] == [-1] * before
    assert bridged.message_indices[before:] == expected.messages.tolist()
    assert not any(bridged.sampled_mask)
    assert len(bridged.sampled_mask) == len(bridged.is_content) == len(bridged.token_ids)
    spans = [span for spans in bridged.content_token_spans_by_role().values() for span in spans]
    texts = [adapter.renderer.tokenizer.decode(bridged.token_ids[start:stop]) for start, stop in spans]
    assert texts == ["42", "And 6 * 8?"]
    assert Kind.CONTEXT in expected.kinds
    assert adapter.bridge_to_next_turn(prompt, completion, [CONVERSATION[4]], tools=TOOLS) is None
    assert adapter.bridge_to_next_turn([], completion, new, tools=TOOLS) is None
    assert adapter.bridge_to_next_turn(prompt, completion, [], tools=TOOLS) is None


def test_thinking_retention_decides_whether_the_bridge_keeps_history(qwen3: Any) -> None:
    thought = {"role": "assistant", "content": "42", "reasoning_content": "A product."}
    for retention, user, tool in ((None, False, True), ("tool_cycle", False, True), ("all", True, True)):
        ours = renderers.create_renderer(qwen3, custom(thinking_retention=retention))
        for new, expected in (({"role": "user", "content": "And?"}, user), ({"role": "tool", "content": "42"}, tool)):
            reply = {**thought, "content": "", "tool_calls": [CALL]} if new["role"] == "tool" else thought
            prompt = ours.render_ids(CONVERSATION[1:2], add_generation_prompt=True)
            completion = ours.render_ids([CONVERSATION[1], reply])[len(prompt) : -1]  # without Qwen's last newline
            assert (ours.bridge_to_next_turn(prompt, completion, [new]) is not None) is expected, (retention, new)


CALLS = {
    '<tool_call>\n{"name": "compute", "arguments": {"formula": "1"}}\n</tool_call>': (
        "ok", "compute", {"formula": "1"},
    ),
    '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>': ("ok", "other", {}),
    '<tool_call>\n{"arguments": {}}\n</tool_call>': ("missing_name", None, {}),
    '<tool_call>\n{"name": "compute", "arguments": {"formula": }}\n</tool_call>': (
        "invalid_json", "compute", '{"formula": }',
    ),
    '<tool_call>\n{"name": "compute", "argum': ("unclosed_block", "compute", ""),
}  # fmt: skip


@pytest.mark.parametrize("text", CALLS)
def test_calls_have_renderers_statuses_and_never_lose_their_arguments(text: str) -> None:
    adapter = TokentraceRenderer(POCKET)
    cut = not text.endswith("</tool_call>")
    ids = adapter.renderer.tokenizer.encode(text + ("" if cut else "<|end|>")).tolist()
    [call] = adapter.parse_response(ids, tools=TOOLS).tool_calls
    status, name, arguments = CALLS[text]
    assert (call.status, call.name, call.arguments) == (renderers.ToolCallParseStatus(status), name, arguments)
    assert adapter.renderer.tokenizer.decode(ids[slice(*call.token_span)]).strip() == text
    strict = TokentraceRenderer(POCKET, TokentraceConfig(refuse_unknown_tools=True))
    [refused] = strict.parse_response(ids, tools=TOOLS).tool_calls
    assert refused.status == ("unknown_tool" if name == "other" else status)


def test_a_call_inside_reasoning_counts_only_if_calls_are_lenient() -> None:
    adapter = TokentraceRenderer(POCKET)
    ids = adapter.renderer.tokenizer.encode(f"<think>\nHm {next(iter(CALLS))}<|end|>").tolist()
    lenient = TokentraceRenderer(POCKET, TokentraceConfig(calls="lenient"))
    assert [len(one.parse_response(ids, tools=TOOLS).tool_calls) for one in (adapter, lenient)] == [0, 1]


def test_open_reasoning_is_reported_as_incomplete() -> None:
    adapter = TokentraceRenderer(POCKET)
    for text, complete in (("<think>\nHm", False), ("<think>\nHm\n</think>\n\nYes<|end|>", True), ("Yes<|end|>", True)):
        ids = adapter.renderer.tokenizer.encode(text)
        parsed = adapter.parse_response(ids.tolist(), prompt_ids=[])
        assert parsed.reasoning_complete is complete
        assert adapter.parse_response(ids, prompt_ids=ids[:0]) == parsed
        adapter.parse_response(ids, prompt_ids=ids)
        assert (parsed.reasoning_content or "").strip() == ("Hm" if "Hm" in text else "")


@pytest.mark.parametrize("kind", ["image", "image_url", "video_url", "input_audio"])
def test_media_are_refused_by_name(kind: str) -> None:
    adapter = TokentraceRenderer(POCKET)
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": kind, kind: {}}]}]
    for refused in (
        lambda: adapter.render(messages),
        lambda: adapter.render_ids(messages),
        lambda: adapter.bridge_to_next_turn([1], [2], messages),
    ):
        with pytest.raises(InputError, match=f"message 0.*{kind}"):
            refused()


def test_prefix_stability_is_that_of_the_template(qwen3: Any) -> None:
    assert TokentraceRenderer(POCKET).is_prefix_stable
    assert not TokentraceRenderer(qwen3).is_prefix_stable  # it drops past reasoning
    unreadable = TokentraceConfig(chat_template="{{ raise_exception('no') }}", renderer="default")
    assert not TokentraceRenderer(POCKET, unreadable).is_prefix_stable


def test_renderers_client_generates_with_it() -> None:
    """The gateway records the ids that renderers' own client sends, also for a bridged turn."""
    adapter = TokentraceRenderer(POCKET)

    async def talk(url: str) -> list[dict[str, Any]]:
        address = f"{url}/sessions/one/v1"
        async with lazy("openai").AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            options: dict[str, Any] = {"client": client, "renderer": adapter, "model": "pocket", "tools": TOOLS}
            options |= {"messages": CONVERSATION[:2], "sampling_params": {"max_tokens": 64, "temperature": 0}}
            first = await renderers.client.generate(**options, prompt_ids=None)
            stream = (first["prompt_ids"], first["completion_ids"])
            bridge = adapter.bridge_to_next_turn(*stream, [CONVERSATION[3]], tools=TOOLS)
            return [first, await renderers.client.generate(**options, prompt_ids=bridge.token_ids)]

    with gateway_server() as served:
        first, second = asyncio.run(talk(served.url))
        [row] = served.rows("one")
    assert first["finish_reason"] == "tool_calls"
    assert second["finish_reason"] == "stop"
    assert row["input_ids"] == second["prompt_ids"] + second["completion_ids"]
    sampled = [i for i, one in enumerate(row["loss_mask"]) if one]
    assert [row["input_ids"][i] for i in sampled] == first["completion_ids"] + second["completion_ids"]
    logprobs = first["completion_logprobs"] + second["completion_logprobs"]
    assert [row["logprobs"][i] for i in sampled] == logprobs


# -- the same names


def test_compat_has_every_name_of_renderers() -> None:
    missing = [name for name in renderers.__all__ if not hasattr(renderers_compat, name)]
    assert not missing
    assert set(renderers.__all__) <= set(dir(renderers_compat))
    ours = {name for name in renderers.__all__ if getattr(renderers_compat, name) is not getattr(renderers, name)}
    assert ours == {"create_renderer", *renderers_compat.CLASSES}
    with pytest.raises(AttributeError):
        renderers_compat.create_nothing  # noqa: B018


def test_compat_resolves_as_renderers_does(qwen3: Any) -> None:
    named = copy.copy(qwen3)
    named.name_or_path = "Qwen/Qwen3-8B"
    ours = renderers_compat.create_renderer(named, chat_template_kwargs={"enable_thinking": False})
    assert type(ours) is renderers_compat.Qwen3Renderer
    assert ours.config == renderers.Qwen3RendererConfig(enable_thinking=False)
    theirs = renderers.create_renderer(named, chat_template_kwargs={"enable_thinking": False})
    prompt = CONVERSATION[:2]
    assert ours.render_ids(prompt, add_generation_prompt=True) == theirs.render_ids(prompt, add_generation_prompt=True)
    unnamed = renderers_compat.create_renderer(POCKET, renderers.AutoRendererConfig(thinking_retention="all"))
    assert type(unnamed) is TokentraceRenderer
    assert unnamed.config.thinking_retention == "all"
    varied = renderers_compat.create_renderer(POCKET, chat_template_kwargs={"enable_thinking": False})
    assert varied.renderer.template_kwargs == {"enable_thinking": False}
    assert type(renderers_compat.create_renderer(qwen3, custom())) is TokentraceRenderer
    assert type(renderers_compat.Qwen3Renderer(qwen3).config) is renderers.Qwen3RendererConfig
