// Words for times, and texts that can be copied.

import { button, copy, el } from "./dom.js";

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

export const copyable = (text) => el("div", { class: "copyable" }, el("code", {}, text), button("copy", (event) => copy(text, event.currentTarget), { class: "copy", "aria-label": "Copy" }));
