// One turn, in words: what was new, the reply, why it branched, and how it was sampled.

import { causeName, counted, el, facts, number } from "./dom.js";
import { duration, moment } from "./words.js";

const SHOWN = 3000; // characters of a text before it is cut

/** What the panel of a turn holds. */
export function turnPanel(turn, { onClose, onTurn }) {
  const link = (other) => el("button", { type: "button", class: "link", onclick: () => onTurn(other) }, `turn ${other}`);
  return [
    el("div", { class: "heading" },
      el("h2", {}, `Turn ${turn.turn}`, el("small", {}, `branch ${turn.branch}`)),
      el("button", { type: "button", class: "close", "aria-label": "Close", onclick: onClose }, "×")),
    turn.cause ? el("div", { class: "cause" },
      el("p", {}, el("b", {}, causeName(turn.cause.cause)), " ", turn.cause.meaning),
      el("p", { class: "soft" }, turn.cause.words)) : null,
    listed("How the echo differed", turn.repairs, "The agent sent these back otherwise than they were sampled. The recorded tokens were used."),
    listed("Notes", turn.notes),
    listed("Not enforced", turn.unenforced),
    listed("Ignored", turn.ignored),
    facts({
      "continues": turn.base === null ? "nothing recorded" : link(turn.base),
      "continued by": turn.continued_by.length ? el("span", {}, turn.continued_by.slice(0, 6).map(link)) : null,
      prompt: `${counted(turn.prompt_tokens, "token")}, ${number(turn.reused)} from the record`,
      sampled: `${counted(turn.sampled_tokens, "token")} (${number(turn.start)}–${number(turn.stop - 1)})`,
      ended: turn.stopped_by === null ? turn.finish_reason : `stop text ${JSON.stringify(turn.stopped_by)}`,
      took: turn.seconds === undefined ? null : duration(turn.seconds),
      at: turn.time ? moment(turn.time) : null,
      "mean logprob": turn.mean_logprob === null ? null : `${turn.mean_logprob} (${turn.logprobs_kind})`,
      cached: turn.cached_tokens === null ? null : counted(turn.cached_tokens, "token"),
      weights: turn.versions.length ? turn.versions.map(([version, start, stop]) => (turn.versions.length > 1 ? `${version}: ${start}–${stop - 1}` : `${version}`)).join(", ") : null,
      sampling: turn.sampling ? Object.entries(turn.sampling).filter(([, value]) => value !== null && value !== "" && !(Array.isArray(value) && !value.length)).map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ") : null,
      tools: turn.tools.length ? turn.tools.join(", ") : null,
      dialect: turn.dialect,
      model: turn.model,
      response: turn.response,
      ...Object.fromEntries(turn.labels.map((label) => [label.name, JSON.stringify(label.value)])),
    }),
    el("h3", {}, "New in this request", el("small", {}, turn.kept ? `after ${counted(turn.kept, "message")} from the record` : "nothing before it")),
    turn.messages.length ? turn.messages.map((message, at) => messageCard(message, turn.kept + at)) : el("p", { class: "soft" }, "No new message."),
    el("h3", {}, "Reply"),
    messageCard(turn.reply, turn.kept + turn.messages.length),
  ].flat().filter(Boolean);
}

function listed(title, items, more) {
  if (!items?.length) return null;
  return el("div", { class: "remarks" }, el("h3", {}, title), el("ul", {}, items.map((item) => el("li", {}, String(item)))), more ? el("p", { class: "soft" }, more) : null);
}

function messageCard(message, number) {
  const role = String(message.role ?? "message");
  const reasoning = message.reasoning_content ?? message.reasoning;
  const calls = Array.isArray(message.tool_calls) ? message.tool_calls : [];
  const parts = [
    typeof reasoning === "string" && reasoning ? cut(reasoning, "reasoning") : null,
    message.content === null || message.content === undefined || message.content === "" ? null : cut(words(message.content), "content"),
    ...calls.map((call) => cut(called(call), "call")),
  ].filter(Boolean);
  return el("article", { class: `message ${["system", "developer", "user", "assistant", "tool"].includes(role) ? role : "other"}` },
    el("p", { class: "who" }, el("b", {}, String(number)), role), parts.length ? parts : el("p", { class: "soft" }, "empty"));
}

function words(content) {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return JSON.stringify(content, null, 1);
  return content.map((part) => (typeof part?.text === "string" ? part.text : JSON.stringify(part))).join("\n");
}

function called(call) {
  const { name, arguments: values } = call?.function ?? call ?? {};
  return `${name}(${typeof values === "string" ? values : JSON.stringify(values)})`;
}

/** A text, cut where it is long, with a button for the rest. */
export function cut(text, kind) {
  const pre = el("pre", { class: kind }, text.slice(0, SHOWN));
  if (text.length <= SHOWN) return pre;
  const all = el("button", { type: "button", class: "link" }, `show all ${number(text.length)} characters`);
  all.addEventListener("click", () => {
    pre.replaceWith(el("pre", { class: kind }, text));
    all.remove();
  });
  return [pre, all];
}
