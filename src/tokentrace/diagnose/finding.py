"""What is wrong with tokens, masks or messages: a cause, a place and a sentence."""

from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import Any, Self

_BRIDGE = "keep the sampled ids and bridge to the next turn; do not render the history again"
_BRANCH = "the model now sees another context: start a new branch here, or keep the history as it was"
_ENCODER = "the ids come from another tokenizer, or from other settings: compare who encoded each prompt"
_PRESERVE = 'bridge to the next turn, or render with past="preserve"'
_KEEP = "keep the ids of long turns; cut samples when you build them, not the record"
_REPAIR = "no bridge can fix it: switch off the agent's repair, or start a new branch here"
_COMPARE = "compare the two requests; with the messages of both, tokentrace can say more"


class WordedEnum(StrEnum):
    """An enum with the annotated attributes, or empty ones."""

    def __new__(cls, value: str, *more: Any) -> Self:
        one = str.__new__(cls, value)
        one._value_ = value
        for name, attribute in zip_longest(cls.__annotations__, more, fillvalue=""):
            setattr(one, name, attribute)
        return one


class Cause(WordedEnum):
    """Why things differ. The value is for programs, ``str()`` for people."""

    label: str
    meaning: str
    advice: str

    def __str__(self) -> str:
        return self.label or self.value.replace("_", " ")

    # A prompt does not begin with the stream so far: what the tokens show.
    BOOLEAN_CASE = "boolean_case", "boolean or None case", "One side is JSON, the other Python.", _BRIDGE
    BPE_REMERGE = "bpe_remerge", "BPE re-merge", "Other tokens spell the same text.", _BRIDGE
    JSON_FORMAT = "json_format", "JSON spacing or key order", "Equal values, written differently.", _BRIDGE
    EMPTY_PARAMETER = "empty_parameter", "empty or missing parameter", "One side lacks a value.", _BRIDGE
    WHITESPACE = "whitespace", "", "Only white space differs.", _BRIDGE
    STOP_TOKEN = "stop_token", "another stop token", "A turn ends with another control token.", _BRIDGE
    STRIPPED_REASONING = "stripped_reasoning", "", "The reasoning of a past turn is gone.", _PRESERVE
    ZEROED_ANCHOR = "zeroed_anchor", "zeroed anchor after truncation", "The client lost some ids.", _KEEP
    UNKNOWN = "unknown", "", "No known cause", _COMPARE
    # What an agent did to the conversation.
    REWRITTEN_CALL = "rewritten_call", "", "A call of the model is changed or no longer readable.", _REPAIR
    CHANGED_TOOLS = "changed_tools", "", "The same messages, other tools or template variables.", _BRANCH
    CHANGED_SYSTEM = "changed_system", "", "Another system prompt before the same conversation.", _BRANCH
    COMPACTION = "compaction", "", "Messages were left out, perhaps for a summary.", _BRANCH
    SUB_AGENT = "sub_agent", "sub-agent", "Another conversation: no recorded one begins like it."
    NONCE = "nonce", "changed number", "A number, a date or an id in an earlier message changed.", _BRANCH
    RETRY = "retry", "", "The same request again, or one that goes back to an earlier point."
    TRIMMED_RESULTS = "trimmed_results", "trimmed result", "An old tool result was cut.", _BRANCH
    CALLS_AS_TEXT = "calls_as_text", "", "The model's tool calls became plain text.", _BRANCH
    EDIT = "edit", "", "An earlier message says something else.", _BRANCH
    TEMPLATE = "template", "", "The template would rewrite what was sampled."
    AMBIGUOUS = "ambiguous", "", "Several recorded turns match the request and differ in their tokens."
    # A row of ids is not the one that the template gives for its conversation.
    BOS_DOUBLED = "bos_doubled", "BOS token doubled"
    BOS_ADDED = "bos_added", "BOS token added", "", _ENCODER
    BOS_MISSING = "bos_missing", "BOS token missing", "", _ENCODER
    SYSTEM_ADDED = "system_added", "system prompt added, though the conversation has none"
    SYSTEM_MISSING = "system_missing", "the template's default system prompt missing"
    REASONING_ADDED = "reasoning_added", "reasoning kept, though the template leaves it out"
    GENERATION_PROMPT = "generation_prompt", "generation prompt at the end"
    LAST_WHITESPACE = "last_whitespace", "white space at the end added or missing"
    END_ADDED = "end_added", "end token added"
    END_MISSING = "end_missing", "end token missing"
    TOOLS_MISSING = "tools_missing"
    CONTROL_AS_TEXT = "control_as_text", "control token spelled as text"
    TEXT_AS_CONTROL = "text_as_control", "text turned into a control token"
    CONTROL_TOKEN = "control_token", "another control token, or one more or less"
    OTHER_TEXT = "other_text", "text that the conversation does not have"
    AFTER_END = "after_end", "tokens after the end"
    CUT = "cut"
    # Ids, masks and logprobs that contradict each other.
    NO_TOKEN = "no_token", "an id that the vocabulary does not have", "", _ENCODER
    NOTHING_SAMPLED = "nothing_sampled", "a call that sampled nothing"
    DUPLICATE_CALL = "duplicate_call", "a call recorded twice"
    BAD_MASK = "bad_mask", "a mask that does not fit the tokens"
    BAD_LABELS = "bad_labels", "labels that contradict the ids or the mask"
    MASK_SHIFTED = "mask_shifted", "mask shifted by one"
    MASK_ADDED = "mask_added", "trained, and should not be"
    MASK_MISSING = "mask_missing", "not trained, and should be"
    TRAINED_UNSAMPLED = "trained_unsampled", "trained, but no engine sampled it"
    SAMPLED_UNTRAINED = "sampled_untrained", "sampled, but not trained"
    NO_LOGPROBS = "no_logprobs"
    BAD_LOGPROBS = "bad_logprobs", "logprobs that do not fit the tokens"
    ZERO_LOGPROBS = "zero_logprobs", "logprobs that are all 0", "Missing logprobs are often padded with 0."

    @property
    def group(self) -> str:
        """The name that ``check --allow`` takes: ids, masks, logprobs or breaks."""
        if self in (Cause.NO_TOKEN, Cause.NOTHING_SAMPLED, Cause.DUPLICATE_CALL):
            return "ids"
        masks = any(word in self.value for word in ("mask", "trained", "labels"))
        return "logprobs" if "logprobs" in self.value else "masks" if masks else "breaks"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, in a file, line or call: `tokens` tokens from `position` on."""

    cause: Cause
    where: str = ""
    message: int | None = None
    field: str = ""
    words: str = ""
    position: int | None = None
    tokens: int = 0

    def __str__(self) -> str:
        position = [] if self.position is None else [f"token {self.position:,}"]
        return ": ".join([*filter(None, [self.where]), *position, str(self.cause), self.words])
