"""sha256 of what each family's row yields: tokenizer.json, and chat_template.jinja where there is one.

A conversion that drifts fails here instead of in a parity test. Print fresh lines with `--pins`.
"""

from __future__ import annotations

PINS: dict[str, tuple[str, str | None]] = {
    "qwen2.5": (
        "c0382117ea329cdf097041132f6d735924b697924d6f6fc3945713e96ce87539",
        "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f",
    ),
    "qwq-32b": (
        "19564a48c4f71a2a1b937cce34c737a1e662b171c5f5d7edf641a15cd896f07d",
        "16488ad69d85833e5f66c50174f39834b688343337e9337f018deaa21b354117",
    ),
    "qwen3": (
        "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
        "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8",
    ),
    "qwen3-instruct-2507": (
        "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
        "64f85b198065d0fba2a81f37e10ed68161ce2c19a754c7100e67e0ca2ee9c326",
    ),
    "qwen3-thinking-2507": (
        "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
        "3802169b2a02b81e6adb7ab4f64f91ff02db753c8c3a64a01c35192d3a61d8d7",
    ),
    "qwen3-vl": (
        "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
        "3636d0f0bd6bef02654cdffdc447b79cb2cef8ab02cc75267345946291a489e4",
    ),
    "qwen3-coder": (
        "19564a48c4f71a2a1b937cce34c737a1e662b171c5f5d7edf641a15cd896f07d",
        "5a38bfa05833266240066aedc497decc9b00cc0d3e3b8cceea98cf530196ab06",
    ),
    "qwen3.5": (
        "5f9e4d4901a92b997e463c1f46055088b6cca5ca61a6522d1b9f64c4bb81cb42",
        "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715",
    ),
    "qwen3.5-nothink": (
        "5f9e4d4901a92b997e463c1f46055088b6cca5ca61a6522d1b9f64c4bb81cb42",
        "273d8e0e683b885071fb17e08d71e5f2a5ddfb5309756181681de4f5a1822d80",
    ),
    "qwen3.6": (
        "5f9e4d4901a92b997e463c1f46055088b6cca5ca61a6522d1b9f64c4bb81cb42",
        "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259",
    ),
    "glm-4.5": (
        "9340665016419c825c4bdabbcc9acc43b7ca2c68ce142724afa829abb1be5efd",
        "44f815868bf02fa458dd2f741a338046f4bf45f398eb6d067766726b9d96cce3",
    ),
    "glm-4.6": (
        "9340665016419c825c4bdabbcc9acc43b7ca2c68ce142724afa829abb1be5efd",
        "bbd2a360282273b2aeb0df692fecca4e716ed14766ca2573bebf2431aadb713a",
    ),
    "glm-4.7": (
        "9340665016419c825c4bdabbcc9acc43b7ca2c68ce142724afa829abb1be5efd",
        "d63ad536c3c81880043e22ec7fd08db42b4d8fb7c89c7138bc562bfa25281375",
    ),
    "glm-4.7-flash": (
        "19e773648cb4e65de8660ea6365e10acca112d42a854923df93db4a6f333a82d",
        "d63ad536c3c81880043e22ec7fd08db42b4d8fb7c89c7138bc562bfa25281375",
    ),
    "glm-5": (
        "19e773648cb4e65de8660ea6365e10acca112d42a854923df93db4a6f333a82d",
        "45a1d5635afd3d8e08a28866e72fc8395d2a7ec30989fd0bdaec6dd45a99eff0",
    ),
    "glm-5.1": (
        "19e773648cb4e65de8660ea6365e10acca112d42a854923df93db4a6f333a82d",
        "03b1bbff20331e54647c68167e8ac7f0b5b7ceb40ead372f44826624a9ad79cd",
    ),
    "glm-5.2": (
        "19e773648cb4e65de8660ea6365e10acca112d42a854923df93db4a6f333a82d",
        "172dc74a35e1752df75ecfb2b2cf9326d2852bb1379868ebeec9571654489679",
    ),
    "minimax-m2": (
        "757622126525aeeb131756849d93298070ff3f0319c455ec8c5bb0f6b1cebbe8",
        "55beae30a60db5cef958f81f8f503df667a495675e560df6c364a9fb0ccba654",
    ),
    "minimax-m3": (
        "bb1f1626cf01448f1e3b6036d0a061ffc66c91d9046aada14ea23a5441b5ad6e",
        "11421244f67553498e5c8112dae02802025bcc4305ec45ad380af95c96f9fe64",
    ),
    "deepseek-v3": (
        "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41",
        "3b8267e54b67df6500f231ffa969955cc9d26b3444a291ced4eb96ca7d3ca1ea",
    ),
    "deepseek-r1": (
        "ecb6f9fc369894346f0511f4074ca75cee5cd5f3b06d02f1ba35fcd39f8e121d",
        "563b1ce7d61d50a9b4c7439a912a1116f095b712df5b5e4d3e1116049874eb64",
    ),
    "deepseek-v3.1": (
        "32b34a41212e92f62e859cbbea121ae705a1fabbf157d9acf22d134ecd8dcf70",
        "45690185067ea25c073bff2d3e425a45ee2564d2bbf6cdf7d885e139d460b8e0",
    ),
    "deepseek-v3.2": (
        "cd050be35cae877f8f0aa847f45aa87e23835a56ca32b29b28545597852784e5",
        None,
    ),
    "deepseek-v4": (
        "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf",
        None,
    ),
    "kimi-k2": (
        "7bab9c7e6f5e028b11539584f0cb49faebe6bf2f46ce54abb8fcb2d0b83b51c2",
        "95acba08e22bf980f058ab9bcd603c7fe0bf9b027e0f04a12ee4fdd9995b3cc3",
    ),
    "kimi-k2.5": (
        "65a45da540b70229532ea6913f7a1c7c4113c8116485397462c4a7c1bf3f42e8",
        "7c91e4b3578b518bfb388d2e3dc645daf0fbf843656e887db75d12891e0030ff",
    ),
    "llama-3.1": (
        "65c210d32b035f3f1da2c1cde464950477593fe1df844be2e9483ef4f9e1e407",
        "e10ca381b1ccc5cf9db52e371f3b6651576caee0a630b452e2816b2d404d4b65",
    ),
    "llama-3.2": (
        "65c210d32b035f3f1da2c1cde464950477593fe1df844be2e9483ef4f9e1e407",
        "5816fce10444e03c2e9ee1ef8a4a1ea61ae7e69e438613f3b17b69d0426223a4",
    ),
    "gpt-oss": (
        "92ad9849e89c7dd44837d7b132be8432d0284452976fb9d2d3f4826d8a8d0f58",
        "a4c9919cbbd4acdd51ccffe22da049264b1b73e59055fa58811a99efbd7c8146",
    ),
    "mistral-nemo": (
        "5326f7ef9847aafd3e7dab1900f790d607c893f1e8e22a089f58b5ae0ccb3b59",
        "e4676cb56dffea7782fd3e2b577cfaf1e123537e6ef49b3ec7caa6c095c62272",
    ),
    "nemotron-3-nano": (
        "ea38006be8d079f6cae2e0396a91a7d2c6e77ca78d8185b62b5717b83fcc3d0b",
        "ab7813c3abdd9cb655905a410728b26c7884eca45ddfab8d9f931553485a7862",
    ),
    "gemma-3": (
        "b2eabafee69d18dac40d838f6f7ac0fa766baca7eb8142ccab37f28138498b91",
        "7de1c58e208eda46e9c7f86397df37ec49883aeece39fb961e0a6b24088dd3c4",
    ),
}
