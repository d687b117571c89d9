"""How a package member becomes the text of a chat template."""

import json
from collections.abc import Callable

from tests.assets.lock import AssetError

KIMI_K2_EDITS: tuple[tuple[str, str], ...] = (
    # llama.cpp numbers the calls itself; the model's template prints the ids that the messages carry.
    ("{%- set tool_response_queue = namespace(ids=[]) -%}\n{%- set tool_call_counter = namespace(value=0) -%}\n", ""),
    ("{{ tools | tojson }}", "{{ tools | tojson(separators=(',', ':')) }}"),
    (
        "{%- set formatted_id = 'functions.' + tool_call['function']['name'] + ':'"
        " + (tool_call_counter.value | string) -%}\n"
        "      {%- set tool_call_counter.value = tool_call_counter.value + 1 -%}\n"
        "      {%- set _ = tool_response_queue.ids.append(formatted_id) -%}\n",
        "{%- set formatted_id = tool_call['id'] -%}\n",
    ),
    (
        "{%- if tool_response_queue.ids -%}\n"
        "      {%- set tool_call_id = tool_response_queue.ids.pop(0) -%}\n"
        "    {%- else -%}\n"
        "      {%- set tool_call_id = 'functions.' + message.get('name', 'unknown') + ':'"
        " + (tool_call_counter.value | string) -%}\n"
        "    {%- endif -%}\n",
        "{%- set tool_call_id = message.tool_call_id -%}\n",
    ),
)
"""llama.cpp's changes to Kimi K2's template, as (changed text, original text)."""


def plain(member: bytes) -> str:
    """The member is the template."""
    return member.decode()


def from_json(member: bytes) -> str:
    """The `chat_template` of a JSON object, or of the only object in a list."""
    document = json.loads(member)
    entry = document[0] if isinstance(document, list) else document
    return str(entry["chat_template"])


def kimi_k2(member: bytes) -> str:
    """llama.cpp's copy with its edits reverted. Raises AssetError if an edit does not occur exactly once."""
    text = member.decode()
    for edited, original in KIMI_K2_EDITS:
        if text.count(edited) != 1:
            raise AssetError(f"Kimi K2: llama.cpp's template no longer has exactly one {edited!r}")
        text = text.replace(edited, original)
    return text.removesuffix("\n")


READERS: dict[str, Callable[[bytes], str]] = {"text": plain, "chat_template": from_json, "kimi-k2": kimi_k2}
"""How a package member becomes a template, by the name the asset list uses."""
