// What is shown where there is nothing to show yet: how to get something.

import { el } from "./dom.js";
import { copyable } from "./words.js";

export function welcome(standing, empty) {
  const base = `${location.origin}/sessions/my-first-run`;
  const python = `from openai import OpenAI\n\nclient = OpenAI(base_url="${base}/v1", api_key="none")\nprint(client.chat.completions.create(\n    model="${standing?.model ?? "tokentrace"}",\n    messages=[{"role": "user", "content": "What is 17 * 23?"}],\n).choices[0].message)`;
  return [el("section", { class: "welcome" },
    el("h1", {}, empty ? "No session yet" : "Choose a session"),
    el("p", {}, empty
      ? "Point an agent at this gateway and it appears here while it runs. It needs nothing but another base URL:"
      : "Its tree, its tokens and why it branched are shown here. Another agent is recorded by giving it a base URL of its own:"),
    el("h3", {}, "OpenAI (Chat Completions, Responses)"), copyable(`${base}/v1`),
    el("h3", {}, "Anthropic (Messages, Claude Code)"), copyable(`export ANTHROPIC_BASE_URL=${base}`),
    el("h3", {}, "Try it"), copyable(python),
    el("p", { class: "soft" }, "The part after /sessions/ is the session's id: one for each rollout. With keys, make sessions with POST /sessions, which returns a key for each."),
    standing?.temporary ? el("p", { class: "warning" }, "The store is in memory: all sessions are gone when the gateway stops. Keep them with --store FILE.") : null)];
}
