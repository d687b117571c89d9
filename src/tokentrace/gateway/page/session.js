// One session: its numbers, its tree, its tokens.

import { sessionPath } from "./asking.js";
import { BranchTokens } from "./branch.js";
import { card, counted, el, facts, number } from "./dom.js";
import { Tree } from "./tree.js";
import { cut } from "./turn.js";
import { ago, duration, moment } from "./words.js";

export class SessionView {
  constructor({ onTurn, onBranch }) {
    this.head = el("section", { class: "head" });
    this.tree = new Tree({ onTurn, onBranch });
    this.tokens = new BranchTokens({ onTurn });
    const key = Tree.key();
    key.append(el("span", { class: "repaired" }), "echo repaired");
    this.figure = el("section", { class: "figure" }, el("div", { class: "heading" }, el("h2", {}, "Tree"), key), this.tree.root);
  }

  /** Show a session: one branch and perhaps one turn. */
  show(state, branch, turn, { moved }) {
    this.head.replaceChildren(...this.header(state));
    this.tree.show(state);
    this.tree.choose(branch, turn);
    const begun = state.branches.length > 0;
    this.figure.hidden = this.tokens.root.hidden = !begun;
    if (!begun) return;
    const visible = state.branches[branch];
    this.tokens.show(state.id, branch, visible.stop, visible.start);
    this.tokens.tokens.choose(turn);
    if (moved && turn !== null) this.tokens.tokens.go(state.tree[turn].start);
  }

  header(state) {
    const last = state.tree.at(-1);
    const session = state.labels.filter((label) => label.turn === null);
    const reward = session.find((label) => label.name === "reward");
    const seconds = state.tree.reduce((sum, turn) => sum + (turn.seconds ?? 0), 0);
    const repairs = state.tree.filter((turn) => turn.repairs?.length).length;
    const rows = (format) => el("a", { href: sessionPath(state.id, `/rows?format=${format}`), download: `${state.id}.${format}` }, format);
    return [
      el("div", { class: "heading" },
        el("h1", {}, state.id, el("span", { class: `state ${state.state}` }, state.state)),
        el("p", { class: "rows" }, "rows: ", rows("jsonl"), rows("parquet"), rows("arrow"))),
      el("div", { class: "cards" },
        card(["Turns", number(state.turns), last?.time ? `last ${ago(last.time) === "now" ? "now" : `${ago(last.time)} ago`}` : "none yet"]),
        card(["Tokens", number(state.tokens), `${number(state.sampled)} sampled`]),
        card(["Rows", number(state.rows), counted(state.branches.length, "branch")]),
        card(["Repaired", number(repairs), `of ${counted(state.turns, "turn")}`]),
        card(["Model time", duration(seconds), last?.model ?? ""]),
        card(["Reward", reward ? String(reward.value) : "–", state.labels.length ? counted(state.labels.length, "label") : "none posted", reward ? (reward.value > 0 ? "good" : "poor") : ""])),
      details("Metadata", state.metadata),
      details("Settings", state.settings),
      details("Labels", Object.fromEntries(state.labels.map((label) => [`${label.name}${label.turn === null ? "" : ` of turn ${label.turn}`}`, label.value]))),
      state.incomplete.length ? el("details", { class: "incomplete", open: true }, el("summary", {}, `${counted(state.incomplete.length, "request")} without a turn`),
        el("ul", {}, state.incomplete.slice(-20).map(unfinished)),
        el("p", { class: "soft" }, "What they sampled is not in the record, and never exported.")) : null,
      state.branches.length ? null : el("p", { class: "soft" }, "No turn yet: it is recorded when the first answer is whole."),
    ].filter(Boolean);
  }
}

function unfinished(request) {
  const why = request.ended ?? "under way, or cut off by a crash";
  const began = request.began ?? request.time;
  return el("li", {}, el("b", {}, why), el("small", {}, [request.dialect, counted(request.prompt_tokens ?? 0, "prompt token"), moment(began)].filter(Boolean).join(" · ")));
}

function details(title, value) {
  if (!value || !Object.keys(value).length) return null;
  const texts = Object.entries(value).map(([name, each]) => [name, typeof each === "string" ? each : JSON.stringify(each)]);
  const size = texts.reduce((sum, [name, text]) => sum + name.length + text.length, 0);
  if (size <= 240) {
    return el("dl", { class: "inline", "aria-label": title }, el("dt", { class: "title" }, title),
      texts.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text))));
  }
  const cells = texts.map(([name, text]) => [name, text.length > 400 ? el("div", {}, cut(text, "content")) : text]);
  return el("details", {}, el("summary", {}, title), facts(Object.fromEntries(cells)));
}
