// The page: a document with its tables and its tree, and one track or contrast of it at a time. The address says which.

import { button, byId, card, copy, counted, el, number, switchTheme, typing } from "./dom.js";
import { band, lanes, legend, Rail, signs, table } from "./parts.js";
import { Tokens } from "./tokens.js";
import { Archive } from "./tracks.js";
import { Tree } from "./tree.js";

const KEYS = [["← →", "token by token"], ["j k", "message by message"], ["[ ]", "difference by difference"], ["/", "search; #1234 finds an id"], ["Enter", "next hit; with Shift, the one before"], ["f", "fold the message; F folds all"], ["c", "copy ids: of what is selected, or of the message"], ["1 – 5", "colours"], ["t", "light or dark"], ["Esc", "close"]];

class Viewer {
  constructor(data) {
    this.archive = new Archive(data);
    this.data = data;
    this.opened = new Set();
    this.tokens = new Tokens({ onPick: (position) => this.pick(position), onGap: (piece) => this.open(piece) });
    this.rail = new Rail({ onRow: (row) => this.jump(row) });
    this.stream = el("section", { class: "stream", "data-view": "kind" });
    this.panel = el("aside", { class: "panel", "aria-live": "polite", hidden: true });
    this.views = el("div", { class: "views", role: "group", "aria-label": "Colours" });
    this.search = el("input", { type: "search", placeholder: "Search", "aria-label": "Search the tokens", autocomplete: "off", spellcheck: "false" });
    this.status = el("small", { class: "hits", role: "status" });
    this.search.addEventListener("input", () => this.find());
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.step(event.shiftKey ? -1 : 1);
    });
    this.picker = this.makePicker();
    this.side = el("nav", { class: "rail", "aria-label": "Messages" }, this.picker, this.rail.root);
    addEventListener("keydown", (event) => this.key(event));
    addEventListener("hashchange", () => this.arrive());
    addEventListener("beforeprint", () => this.tokens.drawAll());
    addEventListener("scroll", () => this.follow(), { passive: true });
  }

  // -- the page

  page() {
    const { data } = this;
    const link = (to) => this.travel(new URLSearchParams(to));
    const longest = data.bars.flatMap((one) => one.streams).reduce((most, [length]) => Math.max(most, length), 1);
    const about = [
      data.lead ? el("p", { class: "lead" }, data.lead) : null,
      data.cards.length ? el("div", { class: "cards" }, data.cards.map(card)) : null,
      data.summary.length ? el("ul", { class: "verdicts" }, data.summary.map((sentence) => el("li", {}, sentence))) : null,
      data.bars.length ? el("div", { class: "streams" }, data.bars.map((one) => lanes(one, longest))) : null,
      data.bars.length ? el("p", { class: "signs lights" }, el("span", { class: "unsampled" }), "prompt, tool results, scaffold", el("span", { class: "drawn" }), "sampled", el("span", { class: "broken" }), "break") : null,
      data.tables.map((one) => table(one, link)),
      remarks("Notes", data.notes),
      data.turns.length ? this.makeTree() : null,
    ];
    const tools = el("div", { class: "bar" },
      button("☰", () => this.side.classList.toggle("open"), { class: "plain drawer", "aria-label": "Messages", title: "Messages" }),
      this.views,
      el("div", { class: "finder" }, this.search, this.status, button("↑", () => this.step(-1), { class: "plain", "aria-label": "The hit before" }), button("↓", () => this.step(1), { class: "plain", "aria-label": "The next hit" })),
      button("fold", () => this.tokens.fold(this.source.rows.map((row) => row.key)), { class: "plain", title: "Fold or unfold all messages (F)" }),
      button("copy ids", (event) => copy(JSON.stringify(this.source.idsOf(0, this.source.total)), event.currentTarget), { class: "plain", title: "The ids of all tokens below, as JSON" }));
    const work = data.tracks.length ? el("div", { class: "work" }, this.side, el("div", { class: "tokens-of" }, tools, this.stream)) : null;
    return [
      el("header", { class: "top" }, el("p", { class: "brand" }, data.brand || "tokentrace"), el("span", { class: "grow" }),
        button("?", () => byId("keys").toggleAttribute("hidden"), { class: "plain", "aria-label": "Keys", title: "Keys (?)" }), button("◐", switchTheme, { class: "plain", "aria-label": "Light or dark", title: "Light or dark (t)" })),
      el("main", { class: "paper" }, el("h1", {}, data.title), about, work),
      this.panel, this.tokens.tip,
      el("div", { class: "keys", id: "keys", hidden: true }, el("h2", {}, "Keys"), el("dl", {}, KEYS.map(([key, what]) => [el("dt", {}, key), el("dd", {}, what)]))),
    ];
  }

  /** Which track or contrast is shown, where there are several. */
  makePicker() {
    const { tracks, contrasts } = this.data;
    const named = tracks.map((one, at) => [one, at]).filter(([one]) => one.name);
    if (named.length + contrasts.length < 2) return null;
    const option = (value, label) => el("option", { value }, label);
    return el("select", { "aria-label": "What is shown", onchange: (event) => this.travel(new URLSearchParams(event.target.value)) },
      contrasts.length ? el("optgroup", { label: "Differences" }, contrasts.map((one, at) => option(`diff=${at}`, one.name))) : null,
      named.length === 0 ? null : el("optgroup", { label: "Tokens" }, named.map(([one, at]) => option(`track=${at}`, one.name))));
  }

  makeTree() {
    const { branches, turns } = this.data;
    this.tree = new Tree({ onTurn: (turn) => this.travel({ track: turns[turn][0], at: turns[turn][1] }), onBranch: (branch) => this.travel({ track: branch }) });
    this.tree.show({
      branches: branches.map(([parent, start, stop, cause], index) => ({ index, parent, start, stop, cause })),
      tree: turns.map(([branch, start, stop, finish_reason], turn) => ({ turn, branch, start, stop, finish_reason, cause: null })),
    });
    return el("section", { class: "figure" }, el("div", { class: "heading" }, el("h2", {}, "Tree"), Tree.key()), this.tree.root);
  }

  // -- where one is: #track=0&at=120, #diff=3

  arrive() {
    const place = new URLSearchParams(location.hash.slice(1) || this.data.start || "track=0");
    if (this.place !== undefined && place.toString() === this.place) return;
    this.place = place.toString();
    const { contrasts, tracks } = this.data;
    const kind = place.has("diff") && contrasts.length ? "diff" : "track";
    const count = (kind === "diff" ? contrasts : tracks).length;
    if (!count) return; // tables alone
    const which = Math.min(count - 1, Math.max(0, Math.trunc(Number(place.get(kind))) || 0));
    this.show(kind, which);
    const at = place.get("at");
    if (at !== null) this.pick(Math.min(this.source.total - 1, Math.max(0, Math.trunc(Number(at)) || 0)), { go: true });
    const query = place.get("q");
    if (query) {
      this.search.value = query;
      this.find();
    }
  }

  /** Go somewhere, and say so in the address. */
  travel(to) {
    const place = new URLSearchParams(to);
    this.write(place);
    this.place = undefined;
    this.arrive();
    byId("tokens-here")?.scrollIntoView({ block: "start" });
    if (place.has("at")) this.tokens.go(this.tokens.picked);
  }

  write(place) {
    try {
      history.replaceState(null, "", `#${place}`);
    } catch {
      location.hash = place; // in a frame of a notebook
    }
    this.place = new URLSearchParams(location.hash.slice(1)).toString();
  }

  get address() {
    return new URLSearchParams({ [this.kind]: this.which });
  }

  // -- one track

  show(kind, which) {
    if (this.kind === kind && this.which === which) return;
    Object.assign(this, { kind, which, opened: new Set() });
    if (this.picker) this.picker.value = `${kind}=${which}`;
    this.fill(kind === "diff" ? this.archive.contrast(which, this.opened) : this.archive.track(which));
    this.tree?.choose(kind === "track" ? which : null, null);
  }

  fill(source) {
    this.source = source;
    const counts = source.counts();
    const marked = [...counts.values()].reduce((sum, [, on]) => sum + on, 0);
    const messages = new Set(source.rows.map((row) => row.message).filter((message) => message !== null)).size;
    const figures = source.contrast || source.textual ? [] : [
      ["Tokens", number(source.total), source.own ? `${number(source.own)} shared` : source.about],
      ...(marked ? [[source.means[0].toUpperCase() + source.means.slice(1), number(marked), `${Math.round((100 * marked) / source.total)} % of the tokens`]] : []),
      ...(messages ? [["Messages", number(messages), ""]] : []),
      ...source.cards,
    ];
    const title = this.picker || source.contrast ? el("h2", { id: "tokens-here" }, source.name, source.contrast && source.about ? el("small", {}, source.about) : null) : el("span", { id: "tokens-here" });
    this.stream.replaceChildren(...[
      title, figures.length ? el("div", { class: "cards" }, figures.map(card)) : null,
      remarks("Notes", source.notes), edits(source.edits), source.contrast ? byField(source) : null,
      band(source, (position) => this.pick(position, { go: true })),
      source.contrast || source.textual ? null : legend(this.data.hues, counts, source.means, (only) => { this.stream.dataset.only = only; }),
      source.textual && !source.contrast ? null : signs(source), this.tokens.root,
    ].filter(Boolean));
    delete this.stream.dataset.only;
    this.showViews(source, marked);
    this.tokens.show(source);
    this.rail.show(source.rows);
    this.panel.hidden = true;
    if (this.search.value) this.find();
    this.follow();
  }

  showViews(source, marked) {
    const offered = [
      source.contrast ? ["change", "Difference"] : null, ["kind", "Kind"], ["message", "Message"],
      marked ? ["mask", source.means[0].toUpperCase() + source.means.slice(1)] : null,
      source.logprobs ? ["logprob", "Logprob"] : null,
      source.pieces.some((piece) => piece.version !== null) ? ["version", "Version"] : null,
    ].filter(Boolean);
    this.offered = offered.map(([name]) => name);
    this.views.replaceChildren(...offered.map(([name, label]) => button(label, () => this.look(name), { "data-name": name })));
    const view = this.stream.dataset.view;
    this.look(source.contrast ? "change" : this.offered.includes(view) ? view : "kind");
  }

  look(name) {
    if (!this.offered.includes(name)) return;
    this.stream.dataset.view = name;
    for (const each of this.views.children) each.setAttribute("aria-pressed", String(each.dataset.name === name));
  }

  /** Show equal tokens that a contrast leaves out. */
  open(piece) {
    this.opened.add(piece.from);
    const top = scrollY;
    this.fill(this.archive.contrast(this.which, this.opened));
    scrollTo({ top });
  }

  jump(row) {
    this.side.classList.remove("open");
    this.tokens.go(row.start, true);
    this.write(new URLSearchParams({ ...Object.fromEntries(this.address), at: row.start }));
    this.tokens.pick(row.start);
  }

  /** Mark in the rail the message that is at the top of the window. */
  follow() {
    if (this.following) return;
    this.following = requestAnimationFrame(() => {
      this.following = 0;
      const box = this.tokens.root.getBoundingClientRect();
      const row = document.elementFromPoint(Math.min(box.right - 20, box.left + 200), Math.min(innerHeight - 20, Math.max(110, box.top + 10)))?.closest?.(".row");
      if (row) this.rail.follow(Number(row.dataset.start));
    });
  }

  // -- one token

  pick(position, { go = false } = {}) {
    if (!this.source.total) return;
    if (go) this.tokens.go(position);
    this.tokens.pick(position);
    const token = this.tokens.token(position);
    const row = this.rowOf(position);
    this.write(new URLSearchParams({ ...Object.fromEntries(this.address), at: position }));
    if (!token || !row) return;
    this.tokens.point(null);
    const { piece } = token.parentNode;
    const ids = (start, stop) => JSON.stringify(this.source.idsOf(start, stop));
    this.panel.replaceChildren(
      button("×", () => this.close(), { class: "plain close", "aria-label": "Close" }), ...this.tokens.described(token),
      el("p", { class: "acts" },
        button("copy id", (event) => copy(String(this.source.idsOf(position, position + 1)), event.currentTarget), { class: "plain" }),
        button(`ids of the ${counted(piece.stop - piece.start, "token")} of this field`, (event) => copy(ids(piece.start, piece.stop), event.currentTarget), { class: "plain" }),
        button(`ids of the message`, (event) => copy(ids(row.start, row.stop), event.currentTarget), { class: "plain" }),
        button("copy link", (event) => copy(location.href, event.currentTarget), { class: "plain" })));
    this.panel.hidden = false;
  }

  rowOf(position) {
    return this.source.rows.findLast((row) => row.start <= position && position < row.stop);
  }

  close() {
    this.panel.hidden = true;
    byId("keys").hidden = true;
    this.side.classList.remove("open");
    this.tokens.pick(null);
    if (this.source) this.write(this.address);
  }

  // -- searching

  find() {
    const query = this.search.value;
    this.hits = query ? this.source.find(query) : [];
    this.hit = -1;
    this.status.textContent = query ? (this.hits.length ? `${number(this.hits.length)} hits` : "none") : "";
    this.tokens.showHits(this.hits, -1);
    const near = this.tokens.picked ?? 0;
    if (this.hits.length) this.step(1, Math.max(0, this.hits.findIndex(([start]) => start >= near)));
  }

  step(by, to = null) {
    if (!this.hits?.length) return;
    this.hit = to ?? (this.hit + by + this.hits.length) % this.hits.length;
    const [start] = this.hits[this.hit];
    this.status.textContent = `${number(this.hit + 1)} of ${number(this.hits.length)}`;
    const row = this.rowOf(start);
    if (row && this.tokens.folded.has(row.key)) this.tokens.fold([row.key], false);
    this.tokens.go(start);
    this.tokens.showHits(this.hits, this.hit);
  }

  // -- keys

  key(event) {
    if (event.key === "Escape") {
      this.search.blur();
      this.close();
    }
    if (typing(event) || !this.source) return;
    const at = this.tokens.picked;
    const rows = this.source.rows;
    const here = at === null ? this.rail.now : rows.indexOf(this.rowOf(at));
    const acts = {
      "/": () => this.search.focus(),
      "?": () => byId("keys").toggleAttribute("hidden"),
      t: switchTheme,
      j: () => here + 1 < rows.length && this.jump(rows[here + 1]),
      k: () => here > 0 && this.jump(rows[here - 1]),
      f: () => rows[here] && this.tokens.fold([rows[here].key]),
      F: () => this.tokens.fold(rows.map((row) => row.key)),
      "]": () => this.difference(1),
      "[": () => this.difference(-1),
      c: () => {
        const [start, stop] = this.tokens.selection() ?? (rows[here] ? [rows[here].start, rows[here].stop] : [0, 0]);
        copy(JSON.stringify(this.source.idsOf(start, stop)));
      },
      ...(at !== null || document.activeElement === this.tokens.root ? {
        ArrowRight: () => this.pick(Math.min(this.source.total - 1, (at ?? -1) + 1), { go: at === null || !this.tokens.token(at + 1) }),
        ArrowLeft: () => this.pick(Math.max(0, (at ?? 1) - 1), { go: at === null || !this.tokens.token(at - 1) }),
      } : {}),
      ...Object.fromEntries(this.offered.map((name, index) => [String(index + 1), () => this.look(name)])),
    };
    if (!Object.hasOwn(acts, event.key)) return;
    event.preventDefault();
    acts[event.key]();
    if (event.key.startsWith("Arrow")) this.tokens.token(this.tokens.picked)?.scrollIntoView({ block: "nearest" });
  }

  difference(by) {
    const places = this.source.differences();
    const at = this.tokens.picked ?? -1;
    const next = by > 0 ? places.find((place) => place > at) : places.findLast((place) => place < at);
    if (next !== undefined) this.pick(next, { go: true });
  }
}

function remarks(title, notes) {
  return notes?.length ? el("details", { class: "notes", open: notes.length < 6 }, el("summary", {}, `${title} (${notes.length})`), el("ul", {}, notes.map((note) => el("li", {}, note)))) : null;
}

function byField(source) {
  const counts = [...source.fieldCounts()];
  if (!counts.length || source.pieces.every((piece) => piece.field === null)) return null;
  const line = ([what, { out, new: added }]) => el("li", {}, what, ": ", [out ? `−${number(out)}` : "", added ? `+${number(added)}` : ""].filter(Boolean).join(" "));
  return el("details", {}, el("summary", {}, `By field (${counts.length})`), el("ul", {}, counts.slice(0, 200).map(line)));
}

function edits(changes) {
  if (!changes?.length) return null;
  const one = ([what, before, out, added, after]) => el("li", {}, el("b", {}, what), el("pre", {}, before, out ? el("del", {}, out) : null, added ? el("ins", {}, added) : null, after));
  return el("details", { class: "edits" }, el("summary", {}, `Changes (${changes.length})`), el("ul", {}, changes.map(one)));
}

/** Show the document of this page. */
export function showPage() {
  const viewer = new Viewer(JSON.parse(byId("document").textContent));
  document.body.append(...viewer.page());
  viewer.arrive();
  document.documentElement.dataset.ready = "";
}
