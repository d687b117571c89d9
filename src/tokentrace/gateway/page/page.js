// The page: which session is chosen (the address says so), what is asked of the gateway every two seconds, and themes.

import { changed, get, sessionPath } from "./asking.js";
import { byId, counted, el, switchTheme, typing } from "./dom.js";
import { SessionList } from "./list.js";
import { SessionView } from "./session.js";
import { turnPanel } from "./turn.js";
import { welcome } from "./welcome.js";

const EVERY = 2000;
const main = byId("main");
const side = byId("side");
const list = new SessionList({ onFilter: () => poll() });
const view = new SessionView({ onTurn: (turn) => go(place.id, { turn }), onBranch: (branch) => go(place.id, { branch }) });

let place = read();
let listed = null; // the last answer about sessions
let state = null; // of the chosen session
let counters = ""; // what they were when it was read
let timer = 0;
let failures = 0;

// -- where one is: #/ID, #/ID/turns/5, #/ID/branches/2

function read() {
  const [, id = "", what = "", which = ""] = location.hash.slice(1).split("/");
  const number = /^\d+$/.test(which) ? Number(which) : null;
  return { id, turn: what === "turns" ? number : null, branch: what === "branches" ? number : null };
}

function go(id, { turn = null, branch = null } = {}) {
  const suffix = turn !== null ? `/turns/${turn}` : branch !== null ? `/branches/${branch}` : "";
  location.hash = `#/${id}${suffix}`;
}

addEventListener("hashchange", () => {
  const before = place;
  place = read();
  if (place.id !== before.id) {
    state = null;
    counters = "";
    main.scrollTop = 0;
    poll();
  } else if (state) showSession({ moved: true });
  list.choose(place.id);
  byId("shell").dataset.chosen = place.id ? "yes" : "no";
  if (!place.id) showNothing();
});

// -- asking

async function poll() {
  clearTimeout(timer);
  const query = list.query;
  if (place.id) query.set("session", place.id);
  try {
    const answer = await changed("sessions", `/page/sessions?${query}`);
    failures = 0;
    if (answer) {
      listed = answer;
      list.show(answer, place.id);
      showStanding(answer.gateway);
    }
    await refresh();
    pulse("live", "live");
  } catch (error) {
    failures += 1;
    pulse("lost", error.status === 401 ? "log in again: reload the page" : error.status ? error.message : "the gateway does not answer");
  }
  list.tick();
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(poll, Math.min(30_000, EVERY * 2 ** Math.min(failures, 4)));
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else poll();
});

/** Read the chosen session again if something about it has changed. */
async function refresh() {
  if (!place.id) return showNothing();
  const { id } = place;
  if (!listed?.chosen) {
    if (listed && !state) showMissing(id);
    return;
  }
  if (listed.chosen.id !== id) return;
  const { turns, state: standing, labels, incomplete, metadata } = listed.chosen;
  const now = JSON.stringify([id, turns, standing, labels, incomplete, metadata, listed.chosen.reward]);
  if (now === counters) return;
  if (standing === "dropped") return showMissing(id, "It was dropped: its tokens are gone.");
  const answer = await get(sessionPath(id));
  if (place.id !== id) return;
  const moved = state === null;
  [state, counters] = [answer, now];
  showSession({ moved });
}

// -- showing

function showSession({ moved }) {
  if (place.turn !== null && place.turn >= state.tree.length) place.turn = null;
  const turn = place.turn;
  const latest = state.tree.at(-1)?.branch ?? 0;
  const wanted = turn === null ? place.branch ?? latest : state.tree[turn].branch;
  const branch = wanted < state.branches.length ? wanted : 0;
  place.branchInView = branch;
  if (!main.contains(view.head)) main.replaceChildren(back(), view.head, view.figure, view.tokens.root);
  document.title = `${state.id} · tokentrace gateway`;
  view.show(state, branch, turn, { moved });
  showTurn(turn);
}

let shownTurn = "";
async function showTurn(turn) {
  const wanted = turn === null ? "" : `${state.id}/${turn}/${counters}`;
  if (wanted === shownTurn) return;
  shownTurn = wanted;
  if (turn === null) {
    side.hidden = true;
    side.replaceChildren();
    return;
  }
  const { id } = place;
  try {
    const answer = await get(sessionPath(id, `/turns/${turn}`));
    if (shownTurn !== wanted) return;
    const branch = answer.branch;
    side.replaceChildren(...turnPanel(answer, { onClose: () => go(id, { branch }), onTurn: (other) => go(id, { turn: other }) }));
  } catch (error) {
    if (shownTurn !== wanted) return;
    side.replaceChildren(el("p", { class: "problem" }, `The turn could not be read: ${error.message}`));
  }
  side.hidden = false;
  side.scrollTop = 0;
}

const back = () => el("a", { class: "back", href: "#/" }, "← all sessions");

function showNothing() {
  if (state !== null || !main.querySelector(".welcome") || main.dataset.empty !== String(isEmpty())) {
    state = null;
    document.title = "tokentrace gateway";
    main.dataset.empty = String(isEmpty());
    if (listed) main.replaceChildren(...welcome(listed.gateway, isEmpty()));
    side.hidden = true;
  }
}

const isEmpty = () => Boolean(listed) && Object.values(listed.counts).every((count) => count === 0);

function showMissing(id, why = "It may not exist yet: it appears when an agent uses it.") {
  state = null;
  counters = "";
  side.hidden = true;
  main.replaceChildren(back(), el("section", { class: "welcome" }, el("h1", {}, `There is no session ${id.slice(0, 140)}`), el("p", {}, why)));
}

function showStanding(gateway) {
  const facts = [gateway.model, gateway.version === null ? null : `weights ${gateway.version}`, gateway.engine, gateway.temporary ? "store in memory" : gateway.store];
  const busy = [gateway.in_flight ? `${counted(gateway.in_flight, "request")} under way` : null, gateway.waiting ? `${gateway.waiting} waiting` : null];
  byId("standing").replaceChildren(
    el("span", {}, facts.filter(Boolean).join(" · ")),
    ...busy.filter(Boolean).map((words) => el("b", {}, words)),
    ...(gateway.paused ? [el("b", { class: "warn" }, "paused")] : []),
    ...(gateway.draining ? [el("b", { class: "warn" }, "shutting down")] : []));
}

function pulse(kind, words) {
  const node = byId("pulse");
  if (node.dataset.kind === kind && node.textContent === words) return;
  node.dataset.kind = kind;
  node.textContent = words;
}

// -- themes

byId("theme").addEventListener("click", switchTheme);

addEventListener("keydown", (event) => {
  if (event.key === "/" && !typing(event)) {
    event.preventDefault();
    byId("search").focus();
  } else if (event.key === "Escape" && place.turn !== null) go(place.id, { branch: place.branchInView });
});

byId("shell").dataset.chosen = place.id ? "yes" : "no";
poll();
