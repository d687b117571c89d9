// Elements, and words for numbers. Every text goes in as text: nothing here or elsewhere writes HTML.

const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

/** Text without anything that a browser would act upon, or that would hide or reorder what is beside it. */
export function visible(text) {
  return String(text).toWellFormed().replace(UNSEEN, (char) => {
    const code = char.codePointAt(0);
    if (code < 32) return String.fromCodePoint(0x2400 + code);
    return code === 127 ? "␡" : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : visible(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    made.append(child instanceof Node ? child : visible(child));
  }
  return made;
}

/** An HTML element: `el("p", {class: "soft", onclick: go}, "text", other)`. */
export const el = (name, attributes = {}, ...children) => filled(document.createElement(name), attributes, children);

/** An SVG element. */
export const svg = (name, attributes = {}, ...children) =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

export const byId = (id) => document.getElementById(id);

const NUMBER = new Intl.NumberFormat("en");
export const number = (value) => (value === null || value === undefined ? "–" : NUMBER.format(value));
export const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : /(ch|s)$/.test(noun) ? "es" : "s"}`;
export const short = (value) => {
  if (value === null || value === undefined) return "–";
  if (value < 10_000) return number(value);
  return value < 1e6 ? `${(value / 1e3).toFixed(value < 1e5 ? 1 : 0)}k` : `${(value / 1e6).toFixed(1)}M`;
};

/** How long ago, in a word: `12 s`, `3 min`, `2 h`, `5 d`. */
export function ago(seconds) {
  const passed = Math.max(0, Date.now() / 1000 - seconds);
  if (passed < 5) return "now";
  if (passed < 60) return `${Math.floor(passed)} s`;
  if (passed < 3600) return `${Math.floor(passed / 60)} min`;
  return passed < 86400 ? `${Math.floor(passed / 3600)} h` : `${Math.floor(passed / 86400)} d`;
}

export const moment = (seconds) => new Date(seconds * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });
export const duration = (seconds) => (seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`);

/** A text that can be copied. */
export function copyable(text) {
  const code = el("code", {}, text);
  const button = el("button", { type: "button", class: "copy", "aria-label": "Copy" }, "copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "press Ctrl+C";
    }
  });
  return el("div", { class: "copyable" }, code, button);
}
