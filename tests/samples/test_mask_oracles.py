"""Loss masks compared with other implementations: generation tags, TRL's trainer, and Prime Intellect's renderers."""

import copy
import json
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conversations import CONVERSATIONS, HI, Conversation
from tests.oracle import Refusal, hf_generation_mask, hf_ids, hf_tokenizer
from tests.support import load_family, make_renderer, per_family, rendered, templates_of_trl
from tests.test_masks import PROMPT, SEPARATOR, kind_of, runs
from tokentrace import RenderedTokens, Renderer, Sample, build_supervised_sample, create_renderer

pytestmark = pytest.mark.filterwarnings("ignore::tokentrace.samples.TurnStartWarning")


def sample_of(renderer: Renderer, conversation: Conversation) -> Sample:
    return build_supervised_sample(renderer, conversation.messages, tools=conversation.tools, past="template")


# -- training templates, and transformers' mask from their generation tags

TAGGED: dict[str, tuple[str, set[str]]] = {
    "qwen3_training": ("qwen3", {SEPARATOR}),
    "qwen3_instruct_2507_training": ("qwen3-instruct-2507", {SEPARATOR}),
    "qwen3_5_think_training": ("qwen3.5", {SEPARATOR, PROMPT}),
    "glm4moe_training": ("glm-4.5", set()),
}
"""TRL's training templates with the vocabularies of their models, and the unsampled text that they tag."""


@per_family
def training_renderer(family: str, name: str) -> Renderer:
    return create_renderer(
        load_family(family),
        "default",
        chat_template=templates_of_trl()[name],
        control_tokens="hf_compat",
        messages="as_given",
    )


@pytest.mark.parametrize(("family", "name"), [(family, name) for name, (family, _) in TAGGED.items()])
def test_row_is_trained_where_generation_is_tagged(family: str, name: str) -> None:
    tagged_unsampled = TAGGED[name][1]
    renderer = training_renderer(family, name)
    examples: dict[str, str] = {}
    trained = 0
    for key, conversation in CONVERSATIONS.items():
        tokens = rendered(renderer, conversation)
        tags = hf_generation_mask(
            hf_tokenizer(family), templates_of_trl()[name], conversation.messages, conversation.tools
        )
        if not isinstance(tokens, RenderedTokens) or isinstance(tags, Refusal):
            continue
        sample = sample_of(renderer, conversation)
        assert sample.token_ids == tags.ids, key
        trained += sample.trained
        for start, stop in runs(sample.mask.tolist(), [bool(on) for on in tags.mask]):
            examples.setdefault(kind_of(tokens, renderer, conversation, start, stop), key)
    assert set(examples) == tagged_unsampled, examples
    assert trained > 100


# -- TRL's trainer

TRAINED_BY_TRL = [
    *("user_assistant", "multi_turn", "multi_turn_open", "consecutive_users", "content_cjk", "content_combining_nfd"),
    *("reasoning_last", "reasoning_every_turn", "think_inline_last", "call_answered", "calls_parallel_answered"),
    *("agentic", "agentic_no_reasoning", "agentic_long_chain"),
]
"""Conversations for the trainer. Each has an assistant turn: the trainer refuses a dataset without one."""


@cache
def trained_by_trl(folder: Path) -> tuple[str, list[tuple[list[int], list[int]]]]:
    """The template that TRL's trainer picks for Qwen3, and the ids and labels that it prepares per conversation."""
    import datasets
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from trl import SFTConfig, SFTTrainer

    datasets.disable_progress_bars()
    tokenizer: Any = copy.deepcopy(hf_tokenizer("qwen3"))
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    shape = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, **shape))
    conversations = [CONVERSATIONS[name] for name in TRAINED_BY_TRL]
    data = datasets.Dataset.from_list(
        [{"messages": one.messages, "tools": json.dumps(one.tools)} for one in conversations], on_mixed_types="use_json"
    )
    arguments = SFTConfig(
        output_dir=str(folder), assistant_only_loss=True, max_length=None, report_to="none", use_cpu=True, bf16=False
    )
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    rows = [(list(row["input_ids"]), list(row["labels"])) for row in trainer.train_dataset]
    return str(trainer.chat_template), rows


@pytest.fixture(scope="module")
def trl_rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[tuple[list[int], list[int]]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch, datasets and TRL about themselves
        return trained_by_trl(tmp_path_factory.mktemp("trl"))


def test_row_is_what_trl_trains_on_but_for_a_line_break(trl_rows: Any) -> None:
    """TRL swaps in its training template, and also trains the line break after each stop token."""
    template, rows = trl_rows
    assert template == templates_of_trl()["qwen3_training"]
    renderer = create_renderer(load_family("qwen3"), "default", chat_template=template)
    for name, (ids, labels) in zip(TRAINED_BY_TRL, rows, strict=True):
        conversation = CONVERSATIONS[name]
        sample = sample_of(renderer, conversation)
        assert sample.token_ids == ids, name
        tokens = renderer.render(conversation.messages, tools=conversation.tools)
        breaks = [turn.stop for turn in tokens.turns]
        assert renderer.tokenizer.decode([ids[at] for at in breaks]) == "\n" * len(breaks), name
        expected = sample.labels.copy()
        expected[breaks] = sample.ids[breaks]
        assert expected.tolist() == labels, name


# -- Prime Intellect's renderers

PEERS = {
    "qwen3": "Qwen3",
    "qwen3-vl": "Qwen3VL",
    "qwen3.5": "Qwen35",
    "glm-4.5": "GLM45",
    "glm-5": "GLM5",
    "kimi-k2.5": "KimiK25",
}
"""Families that `renderers` supports, with its names for them."""

OTHER_IDS = "it writes what the model's template does not: transformers has the ids that we have"
FORGED = "a user's text spells a control token, which it lets through"
PREFILLED = "it counts what the prompt has written of the turn already as sampled"
LEFT_OUT = "it leaves out the first token after the prompt, which the model samples"
CLOSING = "it leaves out the closing tag of thinking that the prompt has opened"

PEER_DIFFERS: dict[str, set[str]] = {
    "qwen3": {OTHER_IDS, FORGED},
    "qwen3-vl": {OTHER_IDS, FORGED},
    "qwen3.5": {OTHER_IDS, FORGED, PREFILLED},
    "glm-4.5": {OTHER_IDS, FORGED, LEFT_OUT},
    "glm-5": {OTHER_IDS, FORGED, CLOSING},
    "kimi-k2.5": {OTHER_IDS, FORGED, PREFILLED},
}
"""How the rows of `renderers` differ from ours."""

PEER_REFUSES: dict[str, set[str]] = {
    # unknown roles, an image without a source, a result that is not text
    "qwen3-vl": {"developer_user", "system_developer_user", "content_image_part", "result_object"},
    "qwen3.5": {"content_image_part"},
    "kimi-k2.5": {"content_image_part"},
}
"""Conversations that the model's template accepts and `renderers` refuses."""


@pytest.mark.parametrize("family", PEERS)
def test_rows_are_those_of_renderers_but_for_its_mistakes(family: str) -> None:
    import renderers
    from renderers.base import build_training_sample

    config = getattr(renderers.configs, f"{PEERS[family]}RendererConfig")()
    peer = renderers.create_renderer(hf_tokenizer(family), config)
    renderer = make_renderer(family, messages="as_given")
    examples: dict[str, str] = {}
    refused: set[str] = set()
    same = 0
    for name, conversation in CONVERSATIONS.items():
        tokens = rendered(renderer, conversation)
        if not isinstance(tokens, RenderedTokens):
            continue
        copied = copy.deepcopy(conversation)
        try:
            theirs = build_training_sample(peer, copied.messages, tools=copied.tools)
        except Exception:
            refused.add(name)
            continue
        causes = list(peer_differences(family, renderer, conversation, tokens, theirs))
        same += not causes
        for cause in causes:
            examples.setdefault(cause, name)
    assert set(examples) == PEER_DIFFERS[family], examples
    assert refused == PEER_REFUSES.get(family, set())
    assert same > 5


def peer_differences(
    family: str, renderer: Renderer, conversation: Conversation, tokens: RenderedTokens, theirs: Any
) -> Iterator[str]:
    sample = sample_of(renderer, conversation)
    if sample.token_ids != theirs.token_ids:
        lenient = make_renderer(family, control_tokens="hf_compat", messages="as_given")
        compatible = lenient.render_ids(conversation.messages, tools=conversation.tools)
        assert hf_ids(family, conversation.messages, conversation.tools) in (compatible, sample.token_ids)
        forged = compatible != sample.token_ids
        yield FORGED if forged and compatible == theirs.token_ids else OTHER_IDS
        return
    for start, stop in runs(sample.mask.tolist(), list(theirs.loss_mask)):
        yield mask_cause(renderer, conversation, tokens, start, stop)


def mask_cause(renderer: Renderer, conversation: Conversation, tokens: RenderedTokens, start: int, stop: int) -> str:
    text = tokens.decode(slice(start, stop))
    if not tokens.mask[start]:
        kind = kind_of(tokens, renderer, conversation, start, stop)
        return PREFILLED if kind == PROMPT else f"trained by it: {text!r}"
    turn = next(turn for turn in tokens.turns if turn.start <= start < turn.stop)
    before = conversation.messages[: turn.message] or [HI]
    prompt = renderer.render(before, tools=conversation.tools, add_generation_prompt=True)
    opening = prompt.ids[prompt.select(field="generation_prompt")]
    if start == turn.start and np.array_equal(opening, tokens.ids[start - len(opening) : start]):
        return LEFT_OUT
    if start == turn.start and text == "</think>" and prompt.text.endswith("<think>"):
        return CLOSING
    return f"left out by it: {text!r}"
