// Why a branch began, in words: a name, and what it means.

const CAUSES = {
  sub_agent: ["sub-agent", "Another conversation: its first messages are not those of any recorded one."],
  changed_tools: ["other tools", "The same messages, with other tools or template variables."],
  changed_system: ["other system prompt", "Another system prompt before the same conversation."],
  nonce: ["changed number", "A number, a date or an id in an earlier message changed, and nothing else did."],
  retry: ["retry", "The same request again, or one that goes back to an earlier point: another reply is sampled."],
  compaction: ["compaction", "Messages were replaced by fewer others, a summary perhaps."],
  trimmed_results: ["trimmed result", "An earlier tool result was shortened or blanked."],
  repaired_call: ["repaired call", "The agent wrote a call of the model's anew: another name or other arguments."],
  calls_as_text: ["calls as text", "Calls of the model's were put into words."],
  edit: ["edit", "An earlier message says something else."],
  template: ["template", "The conversation goes on, but the template would rewrite what was sampled."],
  ambiguous: ["ambiguous", "Several recorded turns fit the echo and differ in their tokens. None of them is guessed."],
};

export const causeName = (cause) => CAUSES[cause]?.[0] ?? String(cause).replaceAll("_", " ");
export const causeMeaning = (cause) => CAUSES[cause]?.[1] ?? "";
