// The tokens of a branch, read from the gateway as they come into view.

import { get, sessionPath } from "./asking.js";
import { button, el } from "./dom.js";
import { legend } from "./parts.js";
import { Tokens } from "./tokens.js";

const PAGE = 1000;
const VIEWS = [["kind", "Kind"], ["message", "Message"], ["logprob", "Logprob"], ["mask", "Sampled"]];
const KINDS = [
  ["prompt", "prompt", "rendered whole: the first prompt, or a rewritten one"],
  ["context", "context", "text of messages that came later: results, the user's words"],
  ["scaffold", "scaffold", "from the template"],
  ["sampled", "sampled", "sampled by the model: these carry loss"],
  ["synthetic", "synthetic", "added to close a turn that was cut off"],
];

export class BranchTokens {
  constructor({ onTurn }) {
    this.tokens = new Tokens({ onPick: (_, piece) => piece.turn !== null && onTurn(piece.turn) });
    this.title = el("h2", {}, "Tokens");
    this.views = el("div", { class: "views", role: "group", "aria-label": "Colours" }, VIEWS.map(([name, label]) => button(label, () => this.look(name), { "data-name": name })));
    this.legend = el("ul", { class: "legend" });
    this.root = el("section", { class: "stream" }, el("div", { class: "heading" }, this.title, this.views), this.legend, this.tokens.root, this.tokens.tip);
    this.look("kind");
  }

  look(name) {
    this.root.dataset.view = name;
    for (const each of this.views.children) each.setAttribute("aria-pressed", String(each.dataset.name === name));
  }

  /** Show a branch; of one that is shown already, only what is new. */
  show(id, branch, total, own) {
    const key = `${id}/${branch}/${own}`;
    if (key !== this.key) {
      this.controller?.abort();
      this.controller = new AbortController();
      this.counted = "";
    }
    this.key = key;
    const { signal } = this.controller;
    const cuts = Array.from({ length: Math.ceil(total / PAGE) }, (_, at) => at * PAGE);
    const read = async (start, stop) => {
      const data = await get(sessionPath(id, `/tokens?branch=${branch}&start=${start}&stop=${stop}`), signal);
      this.showLegend(data.counts);
      return { ...data, pieces: data.pieces.map((piece) => ({ ...piece, place: piece.start, on: piece.kind === "sampled", op: "", field: null, version: null })) };
    };
    this.tokens.show({ key, total, cuts: [...cuts, total], read });
    this.title.textContent = `Tokens of branch ${branch}`;
  }

  showLegend(counts) {
    const digest = JSON.stringify(counts);
    if (this.counted === digest) return;
    this.counted = digest;
    const there = new Map(Object.entries(counts).filter(([, count]) => count).map(([kind, count]) => [kind, [count, 0]]));
    const fresh = legend(KINDS, there, "sampled", (only) => { this.root.dataset.only = only; });
    delete this.root.dataset.only;
    this.legend.replaceWith(fresh);
    this.legend = fresh;
  }
}
