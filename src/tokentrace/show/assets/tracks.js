// What a document holds, read from its columns: tokens in a row, and in pieces of one kind, message and fate.

const COLUMNS = 7; // of a run: length, message, hue, field, mask, turn, version
const PAGE = 500; // tokens that are drawn at once
const AROUND = 24; // equal tokens that are shown on either side of a difference
const BANDS = 700;
const CACHED = 4; // tracks

/** The document of a page. Tracks are read when they are asked for. */
export class Archive {
  constructor(data) {
    this.data = data;
    this.control = new Set(data.control);
    this.cache = new Map();
  }

  /** A track by its number: what it shares with its parents, then the rest. The last few are cached. */
  track(index) {
    const track = this.cache.get(index) ?? this.readTrack(index);
    this.cache.delete(index);
    this.cache.set(index, track);
    if (this.cache.size > CACHED) this.cache.delete(this.cache.keys().next().value);
    return track;
  }

  readTrack(index) {
    const parts = [];
    for (let at = index, stop = Infinity; at >= 0; at = this.data.tracks[at].parent) {
      const json = this.data.tracks[at];
      const begin = json.parent < 0 ? 0 : json.shared;
      parts.unshift([json, begin, Math.min(stop, begin + json.tokens.length)]);
      stop = Math.min(stop, begin);
    }
    const json = this.data.tracks[index];
    const codes = new Int32Array(parts.at(-1)[2]);
    const logprobs = parts.some(([one]) => one.logprobs.length) ? new Float64Array(codes.length).fill(NaN) : null;
    const pieces = [];
    for (const [one, begin, stop] of parts) {
      codes.set(one.tokens.slice(0, Math.max(0, stop - begin)), begin);
      for (const [start, values] of one.logprobs) {
        values.forEach((value, at) => { if (begin + start + at < stop) logprobs[begin + start + at] = value ?? -Infinity; });
      }
      this.readRuns(one, begin, stop, pieces);
    }
    const { roles } = json.roles.length ? json : parts[0][0];
    return new Source(this, { ...json, roles, codes, pieces, logprobs, own: json.parent < 0 ? 0 : json.shared });
  }

  readRuns(json, begin, stop, pieces) {
    const orNull = (value) => (value < 0 ? null : value);
    for (let run = 0, at = begin; run < json.runs.length && at < stop; run += COLUMNS) {
      const [length, message, hue, field, mask, turn, version] = json.runs.slice(run, run + COLUMNS);
      pieces.push({
        start: at, stop: Math.min(stop, at + length), place: at + json.first, kind: this.data.hues[hue][0], message: orNull(message),
        field: json.fielded ? this.data.fields[field] : null, on: mask === 1, turn: orNull(turn), version: orNull(version), op: "",
      });
      at += length;
    }
  }

  /** Both sides of a contrast in one row, equal stretches left out unless they are among those `opened`. */
  contrast(index, opened = new Set()) {
    const json = this.data.contrasts[index];
    const base = this.track(json.base);
    const other = this.track(json.other);
    const parts = [];
    let at = 0; // in the base
    let started = false;
    let moved = 0; // how much further on the other side is there
    const equal = (stop, first, last) => {
      const head = first ? at : Math.min(stop, at + AROUND);
      const tail = last ? stop : Math.max(head, stop - AROUND);
      if (tail - head <= AROUND || opened.has(at)) parts.push([base, at, stop, "", 0]);
      else parts.push([base, at, head, "", 0], { gap: tail - head, from: at, near: base.at(first ? tail : head - 1) }, [base, tail, stop, "", 0]);
    };
    for (const [start, stop, otherStart, otherStop] of this.hunks(json)) {
      equal(start, !started, false);
      started = true;
      parts.push([base, start, stop, "out", 0], [other, otherStart, otherStop, "new", start + moved - otherStart - other.first]);
      moved += otherStop - otherStart - (stop - start);
      at = stop;
    }
    equal(json.stop, !started, true);
    return this.joined(json, base, other, parts);
  }

  /** Where a contrast differs: its places in the list of all of them, as first and count. */
  hunks(json) {
    const places = [];
    for (let range = 0; range < json.hunks.length; range += 2) {
      const [first, count] = json.hunks.slice(range, range + 2);
      for (let at = first; at < first + count; at++) places.push(this.data.hunks.slice(4 * at, 4 * at + 4));
    }
    return places;
  }

  joined(json, base, other, parts) {
    const total = parts.reduce((sum, part) => sum + (part.gap ? 0 : part[2] - part[1]), 0);
    const codes = new Int32Array(total);
    const logprobs = base.logprobs ? new Float64Array(total).fill(NaN) : null;
    const pieces = [];
    let at = 0;
    for (const part of parts) {
      if (part.gap) {
        pieces.push({ ...part.near, start: at, stop: at, op: "", gap: part.gap, from: part.from });
        continue;
      }
      const [side, start, stop, op, shift] = part;
      codes.set(side.codes.subarray(start, stop), at);
      if (logprobs && side.logprobs) logprobs.set(side.logprobs.subarray(start, stop), at);
      for (const piece of side.slice(start, stop)) {
        pieces.push({ ...piece, start: piece.start - start + at, stop: piece.stop - start + at, place: piece.place + shift, op });
      }
      at += stop - start;
    }
    const { means } = base;
    const roles = (base.roles.length < other.roles.length ? other : base).roles.map((_, at) => base.roles[at] ?? other.roles[at]);
    return new Source(this, { roles, means, cards: [], edits: [], ...json, codes, pieces, logprobs, own: 0, contrast: true });
  }
}

/** Tokens in a row. `read` gives some of them as a gateway's answer does: ids, texts, logprobs, and pieces. */
export class Source {
  constructor(archive, columns) {
    Object.assign(this, columns);
    this.archive = archive;
    this.total = this.codes.length;
    this.textual = !this.codes.some((code) => archive.data.words[0][code] >= 0); // texts, not tokens
    this.rows = gather(this.pieces, this.roles);
    this.cuts = cutsOf(this.rows, this.total);
  }

  /** The piece that a token is in. */
  at(position) {
    return this.pieces[first(this.pieces, (piece) => piece.stop > position)] ?? null;
  }

  /** The pieces of some tokens, cut to them. */
  slice(start, stop) {
    const cut = [];
    for (let at = first(this.pieces, (piece) => piece.stop > start || (piece.gap && piece.start >= start)); at < this.pieces.length; at++) {
      const piece = this.pieces[at];
      if (piece.start > stop || (piece.start === stop && stop < this.total)) break;
      if (piece.start === stop && !piece.gap) break;
      const begin = Math.max(start, piece.start);
      cut.push(begin === piece.start && piece.stop <= stop ? piece : { ...piece, start: begin, stop: Math.min(stop, piece.stop), place: piece.place + begin - piece.start });
    }
    return cut;
  }

  read(start, stop) {
    const [ids, texts] = this.archive.data.words;
    const codes = [...this.codes.subarray(start, stop)];
    const control = [];
    codes.forEach((code, at) => { if (this.archive.control.has(code)) control.push(at); });
    return {
      start, stop, control, own: this.own, roles: this.roles, pieces: this.slice(start, stop), versions: this.archive.data.versions,
      ids: codes.map((code) => ids[code]), texts: codes.map((code) => texts[code]),
      logprobs: codes.map((_, at) => (this.logprobs && !Number.isNaN(this.logprobs[start + at]) ? this.logprobs[start + at] : null)),
    };
  }

  idsOf(start, stop) {
    const [ids] = this.archive.data.words;
    return [...this.codes.subarray(start, stop)].map((code) => ids[code]).filter((id) => id >= 0);
  }

  /** How many tokens there are of each kind, and how many of them the mask marks. */
  counts() {
    const byKind = new Map();
    for (const piece of this.pieces) {
      const [tokens, marked] = byKind.get(piece.kind) ?? [0, 0];
      const size = piece.stop - piece.start;
      byKind.set(piece.kind, [tokens + size, marked + (piece.on ? size : 0)]);
    }
    return byKind;
  }

  /** Where a text is, whatever its case, or with `#1234` an id: pairs of first and last token. */
  find(query) {
    const [ids, texts] = this.archive.data.words;
    const hits = [];
    const id = /^#(\d+)$/.exec(query)?.[1];
    if (id !== undefined) {
      this.codes.forEach((code, at) => { if (ids[code] === Number(id)) hits.push([at, at]); });
      return hits;
    }
    if (!this.searched) {
      const lower = texts.map((text, code) => (text ?? String(ids[code])).toLowerCase());
      const parts = Array.from(this.codes, (code) => lower[code]);
      const ends = new Int32Array(this.total);
      let size = 0;
      parts.forEach((part, at) => { ends[at] = size += part.length; });
      this.searched = { text: parts.join(""), ends };
    }
    const { text, ends } = this.searched;
    const needle = query.toLowerCase();
    for (let at = text.indexOf(needle); needle && at >= 0; at = text.indexOf(needle, at + needle.length)) {
      const last = at + needle.length - 1;
      hits.push([first(ends, (end) => end > at), first(ends, (end) => end > last)]);
    }
    return hits;
  }

  /** The whole as bands of one kind, at most so many: start, stop, kind, and what of it is marked. */
  bands() {
    const width = Math.max(1, this.total / BANDS);
    const list = [];
    let column = new Map(); // how many tokens of a look there are in the column that is being filled
    let at = 0;
    const close = (stop) => {
      const [piece] = [...column.values()].reduce((most, each) => (each[1] > most[1] ? each : most), [null, 0]);
      const last = list.at(-1);
      if (last && last.kind === piece.kind && last.op === piece.op && last.on === piece.on) last.stop = stop;
      else list.push({ start: at, stop, kind: piece.kind, op: piece.op, on: piece.on });
      column = new Map();
      at = stop;
    };
    for (const piece of this.pieces) {
      const key = `${piece.kind} ${piece.op} ${piece.on}`;
      for (let start = piece.start; start < piece.stop;) {
        const stop = Math.min(piece.stop, Math.ceil(at + width));
        const weight = (stop - start) * (piece.op ? 50 : 1); // a difference is never lost in the crowd
        column.set(key, [piece, (column.get(key)?.[1] ?? 0) + weight]);
        start = stop;
        if (stop >= at + width) close(stop);
      }
    }
    if (column.size) close(this.total);
    return list;
  }

  /** How many tokens differ, by message and field. */
  fieldCounts() {
    const byField = new Map();
    for (const { op, message, field, start, stop } of this.pieces) {
      if (!op) continue;
      const key = `${field ?? "tokens"}${message === null ? "" : ` of message ${message}`}`;
      const counts = byField.get(key) ?? { out: 0, new: 0 };
      counts[op] += stop - start;
      byField.set(key, counts);
    }
    return byField;
  }

  /** Where differences begin. */
  differences() {
    return this.changed ??= this.pieces.filter((piece, at) => piece.op && !this.pieces[at - 1]?.op).map((piece) => piece.start);
  }
}

/** The first place in an ordered list for which something holds; its length where it never does. */
function first(list, holds) {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(list[middle])) high = middle;
    else low = middle + 1;
  }
  return low;
}

const LOOSE = { generation: "prompt", prompt: "prompt", sampled: "completion", context: "context", plain: "tokens" }; // rows of no message

const ASKS = 16; // tokens that a generation prompt has at most, where nobody says that it is one

/** Pieces gathered by message. What asks for a turn goes with the turn, whoever it belongs to. */
export function gather(pieces, roles) {
  const rows = [];
  let loose = [];
  const open = (piece) => {
    const { message } = piece;
    const title = message === null ? LOOSE[piece.kind] ?? "template" : roles[message] || (piece.turn === null ? "message" : "assistant");
    const row = { start: piece.start, stop: piece.stop, message, title, pieces: [], key: message === null ? `at ${piece.start}` : message };
    rows.push(row);
    return row;
  };
  const add = (row, some) => {
    for (const piece of some) row.pieces.push(piece); // not as arguments: there may be too many
    row.start = row.pieces[0].start;
    row.stop = row.pieces.at(-1).stop;
  };
  const settle = () => {
    if (!loose.length) return;
    const last = rows.at(-1);
    add(last?.message === null ? last : open(loose[0]), loose);
    loose = [];
  };
  for (const piece of pieces) {
    const last = rows.at(-1);
    if (piece.message === null) loose.push(piece);
    else if (last && last.message === piece.message) {
      add(last, [...loose, piece]);
      loose = [];
    } else {
      const asks = piece.turn !== null && (loose.every((each) => each.kind === "scaffold") || piece.start - (loose[0]?.start ?? 0) <= ASKS);
      if (!asks) settle();
      add(open(piece), [...loose, piece]);
      loose = [];
    }
  }
  settle();
  return rows;
}

/** Where pages begin and end: between rows, unless one is too long. */
function cutsOf(rows, total) {
  const cuts = [0];
  for (const row of rows) {
    while (row.stop - cuts.at(-1) > PAGE) {
      const open = row.start - cuts.at(-1);
      cuts.push(open > PAGE / 4 ? row.start : Math.min(row.stop, cuts.at(-1) + PAGE));
    }
  }
  if (cuts.at(-1) < total || cuts.length === 1) cuts.push(total);
  return cuts;
}
