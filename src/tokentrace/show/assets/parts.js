// What surrounds the tokens: tables, streams as bars, the band of the whole, the legend, and the rail of messages.

import { button, counted, el, number, svg, visible } from "./dom.js";
import { hue } from "./tokens.js";

/** A text with code between backticks. */
const coded = (text) => text.split(/`([^`]+)`/).map((part, at) => (at % 2 ? el("code", {}, part) : part));

/** A cell: a text, or one with a tone, a small line, and what a click shows. */
function cell(tag, value, index, words, onLink, code) {
  const [label, tone, small, link] = Array.isArray(value) ? value : [value, "", "", ""];
  const text = code ? coded(label) : label;
  const node = link ? button(text, () => onLink(link), { class: "link" }) : text;
  return el(tag, { class: [index < words ? "" : "number", tone].filter(Boolean).join(" ") || null }, node, small ? el("small", {}, small) : null);
}

/** A table with its title. A row of one cell is a heading. */
export function table(data, onLink) {
  const wide = data.head.length;
  const row = (cells) => (cells.length === 1 && wide > 1
    ? el("tr", { class: "group" }, el("th", { colspan: wide }, cell("span", cells[0], 0, 1, onLink)))
    : el("tr", {}, cells.map((each, at) => cell("td", each, at, data.words, onLink, data.code))));
  return el("section", { class: "table" },
    data.title ? el("h2", {}, data.title) : null, data.about ? el("p", { class: "soft" }, data.about) : null,
    el("div", { class: "wide" }, el("table", { class: wide > 1 && data.words >= wide ? "stacked" : null }, data.head.some((each) => each !== "") ? el("thead", {}, el("tr", {}, data.head.map((each, at) => cell("th", each, at, data.words, onLink)))) : null, el("tbody", {}, data.rows.map(row)))));
}

/** Streams as bars, one below the other: grey for tokens that were not sampled, green for sampled ones, red for breaks. */
export function lanes(data, longest) {
  const step = 8;
  const wide = Math.max(2, longest / 130);
  const high = data.streams.length * step + 4;
  const bar = (name, x, y, width, height) => svg("rect", { class: name, x, y, width, height });
  const bars = data.streams.flatMap(([length, sampled, breaks], at) => {
    const y = at * step + 3;
    return [bar("unsampled", 0, y, length, 5), ...sampled.map(([start, stop]) => bar("drawn", start, y, stop - start, 5)), ...breaks.map((place) => bar("broken", place - wide / 2, y - 1, wide, 7))];
  });
  return el("figure", {}, el("figcaption", {}, data.title, el("small", {}, data.about)),
    svg("svg", { viewBox: `${-wide} 0 ${longest + 2 * wide} ${high}`, preserveAspectRatio: "none", height: Math.max(60, Math.min(420, 6 * data.streams.length)), role: "img", "aria-label": `Streams: ${data.title}` }, bars));
}

/** The whole source as a band: kinds above, what the mask marks below. A click goes there. */
export function band(source, onGo) {
  const bands = source.bands();
  const rect = (each) => svg("rect", { class: each.op || `k-${each.kind}`, x: each.start, width: each.stop - each.start, height: 20 });
  const edges = bands.filter((each) => each.on && !each.op).reduce((all, { start, stop }) => {
    if (all.at(-1)?.[1] === start) all.at(-1)[1] = stop;
    else all.push([start, stop]);
    return all;
  }, []);
  const marked = edges.map(([start, stop]) => svg("rect", { class: "marked", x: start, y: 23, width: stop - start, height: 5 }));
  const picture = svg("svg", { class: "band", viewBox: `0 0 ${Math.max(1, source.total)} 28`, preserveAspectRatio: "none", role: "img", "aria-label": "All tokens in order, by kind" }, bands.map(rect), marked);
  picture.addEventListener("click", (event) => {
    const box = picture.getBoundingClientRect();
    onGo(Math.min(source.total - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * source.total))));
  });
  return picture;
}

/** The kinds that occur, with their counts. A click leaves one of them in colour, and dims the others. */
export function legend(hues, counts, means, onOnly) {
  let only = "";
  const list = el("ul", { class: "legend", "aria-label": "Kinds of tokens" });
  const toggle = (kind) => {
    only = only === kind ? "" : kind;
    onOnly(only);
    for (const each of list.querySelectorAll("button")) each.setAttribute("aria-pressed", String(each.dataset.kind === only));
  };
  for (const [name, label, about] of hues) {
    if (!counts.has(name)) continue;
    const [tokens, marked] = counts.get(name);
    const chip = el("button", { type: "button", class: `k-${name}`, "data-kind": name, title: about, "aria-pressed": "false", onclick: () => toggle(name) },
      el("span"), label, el("b", {}, number(tokens)), marked && marked !== tokens ? el("small", {}, `${number(marked)} ${means}`) : null);
    list.append(el("li", {}, chip));
  }
  return list;
}

const PROBABLE = ["over 99 %", "over 90 %", "over 60 %", "over 22 %", "over 2 %", "less"]; // as tokens.js sorts logprobs

/** What marks mean. */
export const signs = (source) => el("p", { class: "signs" },
  source.contrast
    ? [el("span", { class: "text" }, el("s", { class: "out" }, el("i", {}, visible(source.names[0])))), el("span", { class: "text" }, el("s", { class: "new" }, el("i", {}, visible(source.names[1]))))]
    : [el("span", { class: "text" }, el("s", { class: "k-assistant on" }, el("i", {}, "under"), el("i", {}, "lined"))), source.means === "trained" ? "carries loss" : "sampled by the model"],
  el("span", { class: "text" }, el("s", { class: "k-assistant" }, el("i", {}, "shades"), el("i", {}, " alternate"))), "token by token",
  el("span", { class: "text" }, el("s", { class: "k-scaffold" }, el("b", {}, "boxed"))), "control token",
  el("span", { class: "scale logprob" }, "probability", PROBABLE.map((share, at) => el("i", { class: `l${at}` }, share))),
  el("span", { class: "scale version" }, "version", source.archive.data.versions.map((name, at) => el("i", { class: `v${at % 6}` }, name))));

const LINE = 34; // the height of an entry of the rail

/** The messages, to jump to. Only those in view are there. */
export class Rail {
  constructor({ onRow }) {
    this.onRow = onRow;
    this.list = el("ol", {});
    this.root = el("div", { class: "messages", tabindex: -1, "aria-label": "Messages" }, this.list);
    this.root.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(this.root);
    this.rows = [];
    this.now = -1;
  }

  show(rows) {
    this.rows = rows;
    this.now = -1;
    this.list.style.height = `${rows.length * LINE}px`;
    this.root.scrollTop = 0;
    this.draw();
  }

  draw() {
    const from = Math.max(0, Math.floor(this.root.scrollTop / LINE) - 4);
    const to = Math.min(this.rows.length, from + Math.ceil((this.root.clientHeight || 600) / LINE) + 8);
    const entries = [];
    for (let at = from; at < to; at++) entries.push(this.entry(this.rows[at], at));
    this.list.replaceChildren(...entries);
  }

  entry(row, at) {
    const changed = row.pieces.some((piece) => piece.op);
    const marked = row.pieces.some((piece) => piece.on);
    const size = (piece) => (piece.stop - piece.start) * (piece.kind === "scaffold" ? 0.01 : 1);
    const main = row.pieces.reduce((best, piece) => (size(piece) > size(best) ? piece : best), row.pieces[0]);
    const item = el("li", { class: hue(row.message), "aria-current": at === this.now ? "true" : null },
      el("button", { type: "button", class: `k-${main.kind}`, title: counted(row.stop - row.start, "token"), onclick: () => this.onRow(row) },
        el("span", { class: marked ? "dot on" : "dot" }), el("b", {}, row.message === null ? "" : String(row.message)), el("em", {}, row.title),
        changed ? el("span", { class: "changed", title: "differs" }) : null, el("small", {}, number(row.stop - row.start))));
    item.style.top = `${at * LINE}px`;
    return item;
  }

  /** Mark where one is. */
  follow(start) {
    let at = -1;
    while (at + 1 < this.rows.length && this.rows[at + 1].start <= start) at++;
    if (at === this.now) return;
    this.now = at;
    const top = at * LINE;
    if (top < this.root.scrollTop || top + LINE > this.root.scrollTop + this.root.clientHeight) this.root.scrollTop = top - this.root.clientHeight / 2;
    this.draw();
  }
}
