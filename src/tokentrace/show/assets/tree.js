// The tree of a rollout as a picture. Each branch is a lane: thin for tokens that were not sampled, thick where the model
// sampled some. A branch hangs from the place in its parent's stream up to which they share their tokens.

import { causeName, counted, el, number, svg } from "./dom.js";

const LANE = 44;
const TOP = 30;
const LEFT = 14;
const STEP = 22; // from the place where a branch leaves to where its tokens begin
const LABEL = 110; // the longest label, in characters

/** How wide some tokens are drawn: many more are a little wider. */
const wideness = (tokens, turn) => Math.max((turn ? 12 : 7) + 4.2 * Math.log2(1 + tokens / 12), turn ? 10 + 6.5 * String(turn.turn).length : 0);

/** Where everything is: for each branch its lane, its segments and the place it hangs from. */
export function layout(branches, turns) {
  const turnsOf = branches.map(() => []);
  for (const turn of turns) turnsOf[turn.branch].push(turn);
  const lanes = branches.map((branch) => ({ branch, turns: turnsOf[branch.index], segments: [], lane: 0, from: 0 }));
  for (const lane of lanes) {
    const { branch } = lane;
    lane.from = branch.parent < 0 ? LEFT : placeOf(lanes, branch.parent, branch.start);
    let x = branch.parent < 0 ? LEFT : lane.from + STEP;
    let at = branch.start;
    const add = (stop, turn) => {
      if (stop <= at) return;
      const wide = wideness(stop - at, turn);
      lane.segments.push({ start: at, stop, x, width: wide, turn });
      x += wide;
      at = stop;
    };
    for (const turn of lane.turns.sort((one, other) => one.start - other.start)) {
      add(turn.start, null);
      add(turn.stop, turn);
    }
    add(branch.stop, null);
    lane.end = x;
  }
  let next = 0;
  const children = (parent) => lanes.filter((lane) => lane.branch.parent === parent)
    .sort((one, other) => (parent < 0 ? 0 : other.branch.start - one.branch.start) || one.branch.index - other.branch.index);
  const place = (lane) => {
    lane.lane = next++;
    children(lane.branch.index).forEach(place);
  };
  children(-1).forEach(place);
  return { lanes, height: next * LANE + 12, width: Math.max(...lanes.map((lane) => lane.end)) };
}

function placeOf(lanes, index, position) {
  const lane = lanes[index];
  if (position < lane.branch.start) return placeOf(lanes, lane.branch.parent, position);
  const segment = lane.segments.find((each) => position <= each.stop) ?? lane.segments.at(-1);
  const share = Math.min(1, Math.max(0, (position - segment.start) / (segment.stop - segment.start)));
  return segment.x + share * segment.width;
}

export class Tree {
  constructor({ onTurn, onBranch }) {
    this.onTurn = onTurn;
    this.onBranch = onBranch;
    this.nodes = new Map();
    this.root = el("div", { class: "tree", onkeydown: (event) => this.walk(event) });
    new ResizeObserver(() => this.bring()).observe(this.root);
  }

  /** What its marks mean. */
  static key() {
    const sign = (name, words) => [el("span", { class: name }), words];
    return el("p", { class: "key" }, sign("unsampled prompt", "prompt"), sign("unsampled rewritten", "rewritten"), sign("unsampled context", "context added later"), sign("turn", "sampled"));
  }

  show(state) {
    this.state = state;
    this.nodes.clear();
    if (!state.branches.length) {
      this.root.replaceChildren();
      return;
    }
    const drawn = layout(state.branches, state.tree);
    const room = Math.max(drawn.width + 60, ...drawn.lanes.map((lane) => labelStart(lane) + laneLabel(lane).length * 6.1 + 30));
    const words = `Tree: ${counted(state.branches.length, "branch")}, ${counted(state.tree.length, "turn")}`;
    const picture = svg("svg", { width: room, height: drawn.height, viewBox: `0 0 ${room} ${drawn.height}`, role: "group", "aria-label": words });
    for (const lane of drawn.lanes) picture.append(this.connector(drawn.lanes, lane));
    for (const lane of drawn.lanes) picture.append(this.lane(lane));
    const left = this.root.scrollLeft;
    this.root.replaceChildren(picture);
    this.root.scrollLeft = left;
    this.mark();
  }

  connector(lanes, lane) {
    const { branch, from } = lane;
    if (branch.parent < 0) return svg("g");
    const top = TOP + lanes[branch.parent].lane * LANE;
    const y = TOP + lane.lane * LANE;
    return svg("path", { class: "hang", d: `M${from} ${top}V${y - 9}Q${from} ${y} ${from + 9} ${y}H${from + STEP}` });
  }

  lane(lane) {
    const { branch } = lane;
    const y = TOP + lane.lane * LANE;
    const group = svg("g", { class: "lane", "data-branch": branch.index });
    for (const segment of lane.segments) {
      group.append(segment.turn === null ? givenBar(segment, y, branch) : this.turn(segment, y));
    }
    const text = svg("text", { class: "why", x: labelStart(lane), y: y - 14, role: "button", tabindex: -1 },
      svg("tspan", { class: "name" }, laneName(lane)), svg("tspan", { dx: 7 }, laneDetail(lane)),
      svg("title", {}, [firstTurn(lane)?.cause?.meaning, firstTurn(lane)?.cause?.words].filter(Boolean).join("\n") || "Where the session began"));
    text.addEventListener("click", () => this.onBranch(branch.index));
    group.append(text);
    return group;
  }

  turn(segment, y) {
    const { turn, x } = segment;
    const tokens = turn.stop - turn.start;
    const words = `Turn ${turn.turn}: ${counted(tokens, "sampled token")}, ${turn.finish_reason}`;
    const node = svg("g", { class: `turn ${turn.finish_reason}`, role: "button", tabindex: -1, "aria-label": words, "data-turn": turn.turn },
      svg("rect", { x: x + 0.75, y: y - 8, width: segment.width - 1.5, height: 16, rx: 4 }),
      svg("text", { x: x + segment.width / 2, y: y + 4 }, String(turn.turn)),
      svg("title", {}, words + (turn.repairs?.length ? `\n${counted(turn.repairs.length, "repair")} to the echo` : "")));
    if (turn.repairs?.length) node.append(svg("circle", { class: "repaired", cx: x + segment.width - 4, cy: y - 8, r: 3 }));
    node.addEventListener("click", () => this.onTurn(turn.turn));
    this.nodes.set(turn.turn, node);
    return node;
  }

  /** Mark what is chosen, and bring it into view. */
  choose(branch, turn) {
    this.branch = branch;
    this.chosen = turn;
    this.mark();
    this.bring();
  }

  bring() {
    const node = this.nodes.get(this.chosen)?.querySelector("rect") ?? this.root.querySelector(".lane.chosen .why");
    if (!node) return;
    const box = node.getBoundingClientRect();
    const frame = this.root.getBoundingClientRect();
    if (box.left < frame.left || box.right > frame.right) this.root.scrollLeft += box.left - frame.left - frame.width / 2;
    if (box.top < frame.top || box.bottom > frame.bottom) this.root.scrollTop += box.top - frame.top - frame.height / 2;
  }

  mark() {
    for (const group of this.root.querySelectorAll(".lane")) {
      group.classList.toggle("chosen", Number(group.dataset.branch) === this.branch);
    }
    const reachable = this.nodes.has(this.chosen) ? this.chosen : this.nodes.keys().next().value;
    for (const [turn, node] of this.nodes) {
      node.classList.toggle("chosen", turn === this.chosen);
      node.setAttribute("tabindex", turn === reachable ? 0 : -1);
    }
  }

  walk(event) {
    const turn = Number(event.target.dataset?.turn);
    if (event.target.dataset?.turn === undefined) return;
    const numbers = [...this.nodes.keys()].sort((one, other) => one - other);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const next = event.key === "Enter" || event.key === " " ? turn : numbers[numbers.indexOf(turn) + step];
    if (next === undefined) return;
    event.preventDefault();
    this.onTurn(next);
    this.nodes.get(next)?.focus();
  }
}

const firstTurn = (lane) => lane.turns[0];
const labelStart = (lane) => (lane.branch.parent < 0 ? LEFT : lane.from + STEP);
const laneName = (lane) => {
  const cause = lane.branch.cause || firstTurn(lane)?.cause?.cause;
  return `${lane.branch.index} ${cause ? causeName(cause) : "first branch"}`;
};
const laneDetail = (lane) => {
  const label = firstTurn(lane)?.cause?.words ?? counted(lane.branch.stop, "token");
  return label.length > LABEL ? `${label.slice(0, LABEL - 1)}…` : label;
};
const laneLabel = (lane) => `${laneName(lane)} ${laneDetail(lane)}`;

function givenBar(segment, y, branch) {
  const kind = branch.parent < 0 && segment.start === 0 ? "prompt" : segment.start === branch.start ? "rewritten" : "context";
  return svg("rect", { class: `unsampled ${kind}`, x: segment.x, y: y - 3, width: segment.width, height: 6 },
    svg("title", {}, `${number(segment.stop - segment.start)} tokens that were not sampled`));
}
