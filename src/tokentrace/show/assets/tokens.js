// Tokens in rows, one for each message. They are read and drawn some at a time, as they come into view, and what is far
// away is taken out again: a hundred thousand of them scroll like a hundred.

import { copy, button, counted, el, facts, number, visible } from "./dom.js";
import { gather } from "./tracks.js";

/** A view of a source: `total`, `cuts` (where its pages begin and end), and `read(start, stop)`, at once or in a while. */
export class Tokens {
  constructor({ onPick = () => {}, onGap = () => {} } = {}) {
    this.onPick = onPick;
    this.onGap = onGap;
    this.pages = [];
    this.folded = new Set();
    this.hits = [];
    this.hit = -1;
    this.chosen = null;
    this.tip = el("div", { class: "tip", id: "tip", role: "tooltip", hidden: true });
    this.root = el("div", { class: "tokens", tabindex: 0, role: "document", "aria-label": "Tokens; arrow keys go from token to token" });
    this.seen = new IntersectionObserver((entries) => entries.forEach((entry) => this.turnUp(entry)), { scrollMargin: "1200px", rootMargin: "1200px" });
    new ResizeObserver(() => this.wanted !== undefined && this.go(this.wanted)).observe(this.root);
    this.root.addEventListener("pointermove", (event) => event.pointerType === "mouse" && this.point(event.target.closest("s > *"), event.clientX, event.clientY));
    this.root.addEventListener("pointerleave", () => this.point(null));
    this.root.addEventListener("click", (event) => this.click(event));
    for (const by of ["wheel", "touchmove", "pointerdown", "keydown"]) {
      addEventListener(by, () => { this.wanted = undefined; }, { passive: true, capture: true });
    }
  }

  /** Show a source; of one that has grown, with the same key, only what is new. */
  show(source) {
    const grown = source.key !== undefined && this.source?.key === source.key && source.total >= this.source.total;
    this.source = source;
    if (!grown) {
      this.seen.disconnect();
      this.pages = [];
      this.root.replaceChildren();
      this.point(null);
      this.pick(null);
      this.hits = [];
    }
    this.line = Math.max(20, ((this.root.clientWidth || 700) - 170) / 8); // characters in a line
    source.cuts.slice(1).forEach((stop, at) => {
      const page = this.pages[at];
      if (!page) this.add(source.cuts[at], stop);
      else if (page.stop !== stop) {
        Object.assign(page, { stop, data: null });
        if (page.drawn) this.load(page);
      }
    });
  }

  add(start, stop) {
    const page = { start, stop, node: el("div", { class: "page" }), drawn: false, near: false, data: null };
    page.node.page = page;
    this.pages.push(page);
    this.size(page);
    this.root.append(page.node);
    this.seen.observe(page.node);
  }

  /** About as high as it will be: what is not drawn takes its place. */
  size(page) {
    const high = (start, stop) => Math.ceil(((stop - start) * 4) / this.line) * 24 + 26;
    const rows = this.source.rows?.filter((row) => row.start < page.stop && row.stop > page.start);
    const height = rows ? rows.reduce((sum, row) => sum + (this.folded.has(row.key) ? 44 : high(Math.max(row.start, page.start), Math.min(row.stop, page.stop))), 0) : high(page.start, page.stop);
    page.node.style.minHeight = `${height}px`;
  }

  turnUp(entry) {
    const { page } = entry.target;
    page.near = entry.isIntersecting;
    if (page.near && !page.drawn) this.load(page);
    else if (!page.near && page.drawn && page.node.children.length) {
      page.node.style.minHeight = `${page.node.offsetHeight}px`;
      page.node.replaceChildren();
      page.drawn = false;
    }
  }

  async load(page) {
    page.drawn = true;
    const { source } = this;
    try {
      if (!page.data) {
        const read = source.read(page.start, page.stop);
        page.data = read instanceof Promise ? await read : read;
      }
    } catch (error) {
      if (error.name !== "AbortError") page.node.replaceChildren(el("p", { class: "problem" }, `These tokens could not be read: ${error.message}`));
      page.drawn = false;
      return;
    }
    if (source.key !== this.source.key || (!page.near && !this.wants(page))) {
      page.drawn = false;
      return;
    }
    this.draw(page);
    if (this.wanted !== undefined) this.go(this.wanted);
  }

  draw(page) {
    page.node.replaceChildren(...gather(page.data.pieces, page.data.roles).flatMap((row) => this.row(page.data, row)));
    page.node.style.minHeight = "";
    if (!this.source.archive) return;
    page.data = null; // it can be read again at any time
    this.mark(page);
  }

  /** All of it, for paper. */
  drawAll() {
    for (const page of this.pages) {
      page.near = true;
      if (!page.drawn) this.load(page);
    }
  }

  /** Whether what is to be in view is on a page. It is kept there while others are drawn, until somebody scrolls. */
  wants(page) {
    return this.wanted !== undefined && this.wanted >= page.start && this.wanted < page.stop;
  }

  // -- rows

  row(data, row) {
    const { pieces, message } = row;
    const own = data.own ?? 0;
    const folded = this.folded.has(row.key);
    const turns = [...new Set(pieces.map((piece) => piece.turn).filter((turn) => turn !== null))];
    const gutter = el("div", { class: "gutter" }, el("div", {},
      el("p", {}, button(folded ? "▸" : "▾", () => this.fold([row.key]), { class: "fold", "aria-label": folded ? "Unfold" : "Fold", "aria-expanded": String(!folded) }),
        message === null ? null : el("b", {}, String(message)), el("span", {}, row.title)),
      folded ? null : turns.slice(0, 3).map((turn) => el("small", { class: "turn" }, `turn ${turn}`)),
      folded || this.source.textual ? null : el("small", {}, counted(row.stop - row.start, "token"), this.source.idsOf ? button("copy ids", (event) => copy(JSON.stringify(this.source.idsOf(row.start, row.stop)), event.currentTarget), { class: "copy-ids" }) : null)));
    const text = folded ? el("div", { class: "text preview" }, preview(data, row)) : el("div", { class: "text" }, pieces.map((piece) => this.run(data, piece)));
    const node = el("section", { class: `row ${hue(message)}${own && row.stop <= own ? " shared" : ""}`, "data-start": row.start }, gutter, text);
    const begins = own > 0 && own >= row.start && own < row.stop;
    return begins ? [el("p", { class: "begins" }, `shared up to token ${number(own)}; here the branch begins`), node] : [node];
  }

  run(data, piece) {
    if (piece.gap) return button(counted(piece.gap, "equal token"), () => this.onGap(piece), { class: "gap", title: "Show them" });
    const run = el("s", { class: looks(piece) });
    run.piece = piece;
    run.data = data;
    if (piece.turn !== null && piece.turn === this.chosen) run.classList.add("chosen");
    const control = data.controls ??= new Set(data.control);
    for (let at = piece.start - data.start; at < piece.stop - data.start; at++) {
      const token = document.createElement(control.has(at) ? "b" : "i");
      const text = data.texts[at];
      if (text === null) {
        token.className = "id";
        token.textContent = data.ids[at];
      } else if (text === "") token.className = "part";
      else spell(token, visible(text));
      if (data.logprobs[at] !== null) token.classList.add(`l${BUCKETS.filter((limit) => data.logprobs[at] < limit).length}`);
      run.append(token);
    }
    return run;
  }

  /** Fold messages that are open, and the other way round. */
  fold(keys, close = null) {
    const closing = close ?? !keys.every((key) => this.folded.has(key));
    for (const key of keys) this.folded[closing ? "add" : "delete"](key);
    for (const page of this.pages) {
      if (page.drawn && page.near) this.load(page);
      else this.size(page);
    }
  }

  // -- places

  pageOf(position) {
    return this.pages.find((each) => position < each.stop) ?? this.pages.at(-1);
  }

  /** The element of a token, where it is drawn. */
  token(position) {
    const page = this.pageOf(position);
    const run = [...(page?.node.querySelectorAll("s") ?? [])].find((each) => position < each.piece.stop);
    return run && position >= run.piece.start ? run.children[position - run.piece.start] : null;
  }

  /** Bring a token into view, or the row that it begins to the top. */
  go(position, whole = this.wanted === position && this.whole) {
    const page = this.pageOf(position);
    if (!page) return;
    Object.assign(this, { wanted: position, whole });
    if (!page.drawn) this.load(page);
    const token = this.token(position);
    const row = token?.closest(".row") ?? page.node.querySelector(`.row[data-start="${position}"]`);
    const target = whole ? row : token ?? row;
    (target ?? page.node).scrollIntoView({ block: target && !whole ? "center" : "start" });
  }

  /** Mark a turn's tokens. */
  choose(turn) {
    this.chosen = turn;
    for (const run of this.root.querySelectorAll("s")) run.classList.toggle("chosen", turn !== null && run.piece.turn === turn);
  }

  /** Mark the hits of a search, and the current one. */
  showHits(hits, hit) {
    Object.assign(this, { hits, hit });
    for (const page of this.pages) if (page.drawn) this.mark(page);
  }

  mark(page) {
    for (const token of page.node.querySelectorAll(".hit, .now, .at")) token.classList.remove("hit", "now", "at");
    const light = ([from, to], names) => {
      for (let at = Math.max(from, page.start); at <= Math.min(to, page.stop - 1); at++) this.token(at)?.classList.add(...names);
    };
    this.hits.forEach((each, at) => {
      if (each[1] >= page.start && each[0] < page.stop) light(each, at === this.hit ? ["hit", "now"] : ["hit"]);
    });
    if (this.picked !== null && this.picked >= page.start && this.picked < page.stop) this.token(this.picked)?.classList.add("at");
  }

  // -- single tokens

  positionOf(token) {
    const run = token?.closest?.("s");
    return run?.piece ? run.piece.start + [...run.children].indexOf(token.closest("s > *")) : null;
  }

  /** The tokens that are selected with the mouse, as a range of positions. */
  selection() {
    const { anchorNode, focusNode, isCollapsed } = getSelection();
    if (isCollapsed || !this.root.contains(anchorNode) || !this.root.contains(focusNode)) return null;
    const ends = [anchorNode, focusNode].map((node) => this.positionOf((node.nodeType === Node.TEXT_NODE ? node.parentElement : node).closest("s > *")));
    return ends.includes(null) ? null : [Math.min(...ends), Math.max(...ends) + 1];
  }

  click(event) {
    const token = event.target.closest("s > *");
    if (token && getSelection().isCollapsed) this.onPick(this.positionOf(token), token.parentNode.piece);
  }

  /** Put the mark on a token. */
  pick(position) {
    this.root.querySelector(".at")?.classList.remove("at");
    this.picked = position;
    if (position !== null) this.token(position)?.classList.add("at");
  }

  point(token, x, y) {
    this.tip.hidden = !token;
    if (!token) return;
    if (this.tip.token !== token) this.tip.replaceChildren(...this.described(token));
    this.tip.token = token;
    const box = this.tip.getBoundingClientRect();
    this.tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - box.width - 10))}px`;
    this.tip.style.top = `${y + 20 + box.height > innerHeight ? y - box.height - 12 : y + 20}px`;
  }

  /** The details of a token. */
  described(token) {
    const { piece, data } = token.closest("s");
    const at = this.positionOf(token) - data.start;
    const text = data.texts[at];
    const logprob = data.logprobs[at];
    const shared = (data.own ?? 0) > data.start + at;
    return [
      el("code", {}, text === null ? "no tokenizer" : text === "" ? "part of the character before" : JSON.stringify(text)),
      facts({
        id: data.ids[at] < 0 ? null : data.ids[at],
        position: number((piece.place ?? piece.start) + data.start + at - piece.start),
        message: piece.message === null ? "none" : `${piece.message}${data.roles[piece.message] ? ` (${data.roles[piece.message]})` : ""}`,
        field: piece.field, kind: piece.kind, turn: piece.turn,
        [this.source.means ?? "sampled"]: piece.on ? "yes" : "no",
        logprob: logprob === null ? null : logprob === -Infinity ? "−∞" : `${logprob} (${(100 * Math.exp(logprob)).toFixed(1)} %)`,
        version: piece.version === null || piece.version === undefined ? null : data.versions[piece.version],
        shared: shared ? "with the branch it comes from, which trains it" : null,
        side: { out: "removed", new: "added" }[piece.op],
      }),
    ];
  }
}

const BUCKETS = [-0.01, -0.1, -0.5, -1.5, -4];
export const hue = (message) => (message === null ? "h" : `h h${message % 12}`);

function looks(piece) {
  const version = piece.version === null || piece.version === undefined ? "" : `v${piece.version % 6}`;
  return [`k-${piece.kind}`, hue(piece.message), piece.on ? "on" : "", piece.start % 2 ? "odd" : "", piece.op, version].filter(Boolean).join(" ");
}

function preview(data, row) {
  const texts = data.texts.slice(row.start - data.start, Math.min(row.stop, row.start + 60) - data.start);
  return `${texts.join("").replace(/\s+/g, " ").slice(0, 160)} …`;
}

const WHITE = /(\n|\t|^ +$| {2,}|[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]+)/;

/** Text with its white space made visible: what is there stays there, to be copied. */
function spell(token, text) {
  for (const part of text.split(WHITE)) {
    if (part === "\n" || part === "\t") token.append(el("u", {}, part === "\n" ? "⏎" : "⇥"), part);
    else if (WHITE.test(part)) token.append(el("u", { class: /^ +$/.test(part) ? "blank" : "blank odd" }, part));
    else if (part) token.append(part);
  }
}
