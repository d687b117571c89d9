// Elements, and words for numbers. Every text goes in as text: nothing here or elsewhere writes HTML.

// What is not seen, or hides or reorders what is beside it; selectors and joiners, where they stand after nothing that they
// belong to. The same as in tokens/visible.py.
const HIDDEN =
  "\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f-\\u1160\\u17b4-\\u17b5\\u180e\\u200b\\u200e-\\u200f" +
  "\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufeff\\uffa0\\ufff0-\\ufffb\\u{1bca0}-\\u{1bca3}\\u{1d173}-\\u{1d17a}" +
  "\\u{e0000}-\\u{e00ff}\\u{e01f0}-\\u{e0fff}";
const SELECTORS = "\\u180b-\\u180d\\u180f\\ufe00-\\ufe0f\\u{e0100}-\\u{e01ef}";
const JOINERS = "\\u200c-\\u200d";
const WRITTEN = `[^\\x00-\\x7f${HIDDEN}${SELECTORS}${JOINERS}]`;
const UNSEEN = new RegExp(`[${HIDDEN}]|(?<!${WRITTEN})[${SELECTORS}]|(?<!${WRITTEN})(?<!${WRITTEN}[${SELECTORS}])[${JOINERS}]`, "gu");

/** Text without anything that a browser would act upon, or that would hide or reorder what is beside it. */
export function visible(text) {
  return String(text).toWellFormed().replace(UNSEEN, (char) => {
    const code = char.codePointAt(0);
    if (code < 32) return String.fromCodePoint(0x2400 + code);
    return code === 127 ? "␡" : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : visible(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : visible(child));
  }
  return node;
}

/** An HTML element: `el("p", {class: "soft", onclick: go}, "text", other)`. */
export const el = (name, attributes = {}, ...children) => filled(document.createElement(name), attributes, children);

/** An SVG element. */
export const svg = (name, attributes = {}, ...children) =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

/** A button that does something. */
export const button = (label, onclick, attributes = {}) => el("button", { type: "button", onclick, ...attributes }, label);

export const byId = (id) => document.getElementById(id);

const NUMBER = new Intl.NumberFormat("en");
export const number = (value) => (value === null || value === undefined ? "–" : NUMBER.format(value));
export const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : /(ch|s)$/.test(noun) ? "es" : "s"}`;
export const short = (value) => {
  if (value === null || value === undefined) return "–";
  if (value < 10_000) return number(value);
  return value < 1e6 ? `${(value / 1e3).toFixed(value < 1e5 ? 1 : 0)}k` : `${(value / 1e6).toFixed(1)}M`;
};

/** Copy a text, and confirm it on the button that was pressed. */
export async function copy(text, pressed) {
  const label = pressed?.textContent;
  let message = "copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { class: "unseen" });
    area.value = text;
    document.body.append(area);
    area.select();
    if (!document.execCommand("copy")) message = "not allowed here";
    area.remove();
  }
  if (!pressed) return;
  pressed.textContent = message;
  setTimeout(() => { pressed.textContent = label; }, 1200);
}

/** Names and values, those that are there. */
export function facts(values, attributes = {}) {
  const there = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("dl", { class: "facts", ...attributes }, there.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value instanceof Node ? value : String(value))]));
}

/** A figure: a name, a number, and a word on it. */
export const card = ([name, value, more, tone]) =>
  el("div", { class: `card ${tone ?? ""}` }, el("p", {}, name), el("strong", { title: value }, value), el("small", { title: more }, more));

/** Light where it was dark, and the other way round. */
export function switchTheme() {
  const page = document.documentElement;
  const dark = (page.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  page.dataset.theme = dark ? "light" : "dark";
}

/** Whether somebody is writing into a field, where keys mean letters. */
export const typing = (event) => event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName ?? "");

/** The name of a cause, for people. */
export const causeName = (cause) => String(cause).replaceAll("_", " ");
