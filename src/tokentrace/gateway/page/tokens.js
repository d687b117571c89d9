// The tokens of a branch, coloured by kind. They are fetched and drawn some at a time, as they come into view, and what
// is far away is taken out again: a hundred thousand of them scroll like a hundred.

import { get, sessionPath } from "./asking.js";
import { byId, counted, el, number } from "./dom.js";

const PAGE = 1000;
const KINDS = ["prompt", "context", "scaffold", "sampled", "synthetic"];
const MEANINGS = {
  prompt: "rendered whole: the first prompt, or a rewritten one",
  context: "text of messages that came later: results, the user's words",
  scaffold: "written by the template around it",
  sampled: "sampled by the model: these carry loss",
  synthetic: "put in to close a turn that was cut off",
};

export class Tokens {
  constructor({ onTurn }) {
    this.onTurn = onTurn;
    this.legend = el("ul", { class: "legend" });
    this.title = el("h2", {}, "Tokens");
    this.views = el("div", { class: "views", role: "group", "aria-label": "Colours" },
      this.view("kind", "By kind"), this.view("logprob", "By logprob"), this.view("sampled", "Sampled only"));
    this.body = el("div", { class: "tokens", tabindex: 0, role: "document", "aria-label": "Tokens of the branch; arrow keys go from token to token" });
    this.root = el("section", { class: "stream", "data-view": "kind" },
      el("div", { class: "heading" }, this.title, this.views), this.legend, this.body);
    this.seen = new IntersectionObserver((entries) => entries.forEach((entry) => this.turnUp(entry)), { scrollMargin: "1200px", rootMargin: "1200px" });
    new ResizeObserver(() => this.wanted !== undefined && this.go(this.wanted)).observe(this.body);
    this.body.addEventListener("mousemove", (event) => this.hover(event));
    this.body.addEventListener("mouseleave", () => this.point(null));
    this.body.addEventListener("keydown", (event) => this.walk(event));
    this.body.addEventListener("blur", () => this.point(null));
    this.body.addEventListener("click", (event) => this.click(event));
    for (const by of ["wheel", "touchmove", "pointerdown", "keydown"]) {
      addEventListener(by, () => { this.wanted = undefined; }, { passive: true, capture: true });
    }
  }

  view(value, label) {
    const choose = (event) => {
      this.root.dataset.view = value;
      for (const each of this.views.children) each.setAttribute("aria-pressed", String(each === event.currentTarget));
    };
    return el("button", { type: "button", "aria-pressed": String(value === "kind"), onclick: choose }, label);
  }

  /** Show a branch; of one that is shown already, only what is new. */
  show(id, branch, total, own) {
    const same = this.id === id && this.branch === branch && this.own === own && total >= this.total;
    Object.assign(this, { id, branch, own });
    if (!same) {
      this.controller?.abort();
      this.controller = new AbortController();
      this.seen.disconnect();
      this.pages = [];
      this.body.replaceChildren();
      this.legend.replaceChildren();
      this.total = 0;
    }
    if (total > this.total) {
      const last = this.pages.at(-1);
      this.total = total;
      if (last && last.stop - last.start < PAGE) this.reload(last);
      for (let start = this.pages.length * PAGE; start < total; start += PAGE) this.add(start);
    }
    this.title.textContent = `Tokens of branch ${branch}`;
  }

  add(start) {
    const page = { start, stop: Math.min(this.total, start + PAGE), node: el("div", { class: "page" }), loaded: false, data: null };
    page.node.style.minHeight = `${this.guess(page)}px`;
    page.node.page = page;
    this.pages.push(page);
    this.body.append(page.node);
    this.seen.observe(page.node);
  }

  guess(page) {
    const line = Math.max(20, ((this.body.clientWidth || 700) - 150) / 8);
    return Math.ceil(((page.stop - page.start) * 3.6) / line) * 24 + 24;
  }

  reload(page) {
    page.stop = Math.min(this.total, page.start + PAGE);
    page.data = null;
    if (page.loaded) this.load(page);
  }

  turnUp(entry) {
    const { page } = entry.target;
    page.near = entry.isIntersecting;
    if (page.near && !page.loaded) this.load(page);
    else if (!page.near && page.loaded && page.node.children.length) {
      page.node.style.minHeight = `${page.node.offsetHeight}px`;
      page.node.replaceChildren();
      page.loaded = false;
    }
  }

  async load(page) {
    page.loaded = true;
    try {
      if (!page.data) {
        const query = `branch=${this.branch}&start=${page.start}&stop=${page.stop}`;
        page.data = await get(sessionPath(this.id, `/tokens?${query}`), this.controller.signal);
      }
    } catch (error) {
      if (error.name !== "AbortError") page.node.replaceChildren(el("p", { class: "problem" }, `These tokens could not be read: ${error.message}`));
      page.loaded = false;
      return;
    }
    this.showLegend(page.data.counts);
    if (!page.near && !this.wants(page)) {
      page.loaded = false;
      return;
    }
    page.node.replaceChildren(...rows(page.data, this.chosen));
    page.node.style.minHeight = "";
    if (this.wanted !== undefined) this.go(this.wanted);
  }

  /** Whether what is to be in view is on a page. It is kept there while others are drawn, until somebody scrolls. */
  wants(page) {
    return this.wanted !== undefined && this.wanted >= page.start && this.wanted < page.stop;
  }

  showLegend(counts) {
    const digest = JSON.stringify(counts);
    if (this.legend.digest === digest && this.legend.children.length) return;
    this.legend.digest = digest;
    const toggle = (kind) => {
      this.only = this.only === kind ? "" : kind;
      this.root.dataset.only = this.only;
      for (const each of this.legend.querySelectorAll("button")) each.setAttribute("aria-pressed", String(each.dataset.kind === this.only));
    };
    const item = (kind) => el("li", {}, el("button", {
      type: "button", class: kind, "data-kind": kind, title: MEANINGS[kind], "aria-pressed": String(this.only === kind), onclick: () => toggle(kind),
    }, el("span"), kind, el("b", {}, number(counts[kind]))));
    this.legend.replaceChildren(...KINDS.filter((kind) => counts[kind]).map(item));
  }

  /** Bring a position into view. */
  go(position) {
    const page = this.pages.find((each) => position < each.stop) ?? this.pages.at(-1);
    if (!page) return;
    this.wanted = position;
    const piece = page.loaded && page.data ? [...page.node.querySelectorAll("s")].find((each) => position < each.from + each.children.length) : null;
    (piece ?? page.node).scrollIntoView({ block: piece ? "center" : "start" });
    if (!piece && !page.loaded) this.load(page);
  }

  /** Mark a turn's tokens. */
  choose(turn) {
    this.chosen = turn;
    for (const piece of this.body.querySelectorAll("s")) piece.classList.toggle("chosen", turn !== null && piece.turn === turn);
  }

  click(event) {
    const turn = event.target.closest("s")?.turn ?? null;
    if (turn !== null && getSelection().isCollapsed) this.onTurn(turn);
  }

  // -- what is said of a token

  hover(event) {
    const token = event.target.closest("s > *");
    this.point(token, event.clientX, event.clientY);
  }

  walk(event) {
    const step = { ArrowRight: "next", ArrowLeft: "previous" }[event.key];
    if (!step) return;
    event.preventDefault();
    const all = [...this.body.querySelectorAll("s > *")];
    const at = this.cursor?.isConnected ? all.indexOf(this.cursor) + (step === "next" ? 1 : -1) : 0;
    const token = all[at];
    if (!token) return;
    token.scrollIntoView({ block: "nearest" });
    const box = token.getBoundingClientRect();
    this.point(token, box.left, box.bottom);
  }

  point(token, x, y) {
    const tip = byId("tip");
    this.cursor?.classList.remove("at");
    tip.hidden = !token;
    this.cursor = token;
    if (!token) return;
    token.classList.add("at");
    tip.replaceChildren(...described(token));
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - box.width - 10))}px`;
    tip.style.top = `${y + 20 + box.height > innerHeight ? y - box.height - 12 : y + 20}px`;
  }
}

function described(token) {
  const piece = token.parentNode;
  const { data } = token.closest(".page").page;
  const at = piece.from - data.start + [...piece.children].indexOf(token);
  const facts = { id: data.ids[at], position: number(data.start + at), kind: piece.kind };
  facts.message = piece.message === null ? "none" : `${piece.message}${data.roles[piece.message] ? ` (${data.roles[piece.message]})` : ""}`;
  if (piece.turn !== null) facts.turn = piece.turn;
  const logprob = data.logprobs[at];
  if (logprob !== null) facts.logprob = `${logprob} (${(100 * Math.exp(logprob)).toFixed(1)} %)`;
  if (data.start + at < data.own) facts.shared = "with the branch it comes from, which trains it";
  const text = data.texts[at];
  return [
    el("code", {}, text === "" ? "part of the character before" : JSON.stringify(text)),
    el("dl", {}, Object.entries(facts).map(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))])),
  ];
}

// -- drawing

/** Pieces gathered by message. What belongs to none goes with the message after it: mostly it is its generation prompt. */
function blocks(pieces) {
  const found = [];
  let loose = [];
  for (const piece of pieces) {
    if (piece.message === null) loose.push(piece);
    else {
      const last = found.at(-1);
      if (last && last.message === piece.message) last.pieces.push(...loose, piece);
      else found.push({ message: piece.message, pieces: [...loose, piece] });
      loose = [];
    }
  }
  if (loose.length) found.push({ message: null, pieces: loose });
  return found;
}

function rows(data, chosen) {
  const control = new Set(data.control);
  return blocks(data.pieces).flatMap((block) => {
    const { pieces, message } = block;
    const tokens = el("div", { class: "text" }, pieces.map((piece) => drawn(data, piece, control, chosen)));
    const turns = [...new Set(pieces.map((piece) => piece.turn).filter((turn) => turn !== null))];
    const role = message === null ? "template" : data.roles[message] ?? (turns.length ? "assistant" : "message");
    const size = pieces.at(-1).stop - pieces[0].start;
    const gutter = el("div", { class: "gutter" },
      el("p", {}, message === null ? null : el("b", {}, String(message)), role),
      turns.map((turn) => el("small", { class: "turn" }, `turn ${turn}`)), el("small", {}, counted(size, "token")));
    const begins = data.own > 0 && data.own >= pieces[0].start && data.own < pieces.at(-1).stop;
    const row = el("div", { class: pieces.at(-1).stop <= data.own ? "row shared" : "row" }, gutter, tokens);
    return begins ? [el("p", { class: "begins" }, `shared up to token ${number(data.own)}; here branch ${data.branch} begins`), row] : [row];
  });
}

const BUCKETS = [-0.01, -0.1, -0.5, -1.5, -4];

function drawn(data, piece, control, chosen) {
  const run = el("s", { class: piece.kind });
  Object.assign(run, { from: piece.start, kind: piece.kind, turn: piece.turn, message: piece.message });
  if (piece.turn !== null && piece.turn === chosen) run.classList.add("chosen");
  if (piece.start % 2) run.classList.add("odd");
  for (let at = piece.start - data.start; at < piece.stop - data.start; at++) {
    const token = document.createElement(control.has(at) ? "b" : "i");
    const text = data.texts[at];
    if (text === "") token.className = "part";
    else marked(token, text);
    const logprob = data.logprobs[at];
    if (logprob !== null) token.classList.add(`l${BUCKETS.filter((limit) => logprob < limit).length}`);
    run.append(token);
  }
  return run;
}

/** Text with a sign at each newline and tab. */
function marked(token, text) {
  for (const part of text.split(/(?<=[\n\t])/)) {
    const sign = { "\n": "⏎", "\t": "⇥" }[part.at(-1)];
    if (!sign) token.append(part);
    else token.append(part.slice(0, -1), el("u", {}, sign), part.at(-1));
  }
}
