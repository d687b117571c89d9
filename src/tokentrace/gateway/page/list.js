// The list of sessions. Rows change in place, so that a list that is polled does not flicker.

import { byId, counted, el, number, short } from "./dom.js";
import { ago } from "./words.js";

const STATES = ["open", "sealed", "exported", "dropped"];
const rows = new Map();

export class SessionList {
  constructor({ onFilter }) {
    this.state = "";
    this.limit = 200;
    this.onFilter = onFilter;
    this.list = byId("list");
    const search = byId("search");
    let later = 0;
    search.addEventListener("input", () => {
      clearTimeout(later);
      later = setTimeout(onFilter, 120);
    });
    this.list.addEventListener("keydown", (event) => this.walk(event));
    search.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown") this.list.querySelector("a")?.focus();
    });
  }

  /** What the gateway is asked for. */
  get query() {
    const query = new URLSearchParams({ limit: this.limit });
    const search = byId("search").value.trim();
    if (search) query.set("search", search);
    if (this.state) query.set("state", this.state);
    return query;
  }

  get filtered() {
    return Boolean(this.state || byId("search").value.trim());
  }

  show(answer, chosen) {
    this.showStates(answer.counts);
    const items = answer.sessions.map((session) => row(session, session.id === chosen));
    if (answer.more) items.push(this.more());
    if (!items.length) {
      const words = this.filtered ? "No session fits. Ids and metadata are searched." : "No session yet.";
      items.push(el("li", { class: "none" }, words));
    }
    const current = new Set(items);
    for (const child of [...this.list.children]) if (!current.has(child)) child.remove();
    items.forEach((item, at) => {
      if (this.list.children[at] !== item) this.list.insertBefore(item, this.list.children[at] ?? null);
    });
    const ids = new Set(answer.sessions.map((session) => session.id));
    for (const id of rows.keys()) if (!ids.has(id)) rows.delete(id);
  }

  showStates(counts) {
    const all = STATES.reduce((sum, state) => sum + counts[state], 0);
    const chip = (state, label, count) =>
      el("button", {
        type: "button", "aria-pressed": String(this.state === state),
        onclick: () => { this.state = state; this.onFilter(); },
      }, label, el("small", {}, short(count)));
    const focused = [...byId("states").children].indexOf(document.activeElement);
    byId("states").replaceChildren(chip("", "all", all), ...STATES.filter((state) => counts[state] || state === this.state).map((state) => chip(state, state, counts[state])));
    byId("states").children[focused]?.focus();
  }

  more() {
    const show = () => { this.limit = Math.min(5000, this.limit * 4); this.onFilter(); };
    return el("li", { class: "more" }, el("button", { type: "button", onclick: show }, "show more"));
  }

  choose(id) {
    for (const [name, { link }] of rows) link.toggleAttribute("aria-current", name === id);
  }

  /** Ages change although nothing else does. */
  tick() {
    for (const { age, when } of rows.values()) setText(age, ago(when));
  }

  walk(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const links = [...this.list.querySelectorAll("a")];
    const next = links[links.indexOf(document.activeElement) + step];
    event.preventDefault();
    if (next) next.focus();
    else if (step < 0) byId("search").focus();
  }
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function row(session, chosen) {
  const row = rows.get(session.id);
  const digest = JSON.stringify(session);
  if (row?.digest === digest) {
    row.link.toggleAttribute("aria-current", chosen);
    return row.item;
  }
  const item = row?.item ?? el("li");
  const when = session.last ?? session.created;
  const age = el("time", { title: session.last ? "since the last turn" : "since it began" }, ago(when));
  const reward = session.reward;
  const link = el("a", { href: `#/${session.id}`, "aria-current": chosen, class: session.under_way ? "busy" : null },
    el("span", { class: `dot ${session.state}`, title: session.under_way ? "a request is under way" : session.state }),
    el("b", {}, session.id), age,
    el("span", { class: "facts" },
      session.turns ? `${counted(session.turns, "turn")} · ` : "no turn yet",
      !session.turns ? null : session.tokens === undefined ? `${short(session.sampled)} sampled` : `${short(session.tokens)} tokens`,
      session.branches > 1 ? ` · ${counted(session.branches, "branch")}` : null,
      session.rows !== undefined && session.rows !== session.branches ? ` · ${counted(session.rows, "row")}` : null,
      session.state === "open" ? null : ` · ${session.state}`),
    reward === undefined || reward === null ? null
      : el("span", { class: `reward ${reward > 0 ? "good" : "poor"}`, title: "reward" }, typeof reward === "number" ? number(reward) : "?"),
    session.metadata ? el("span", { class: "about" }, session.metadata) : null);
  item.replaceChildren(link);
  rows.set(session.id, { item, link, age, when, digest });
  return item;
}
