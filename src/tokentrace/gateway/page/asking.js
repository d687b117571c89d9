// What the gateway is asked. Answers that have not changed come back as null.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const tags = new Map();

async function ask(path, headers, signal) {
  const url = new URL(path, location.origin); // the page's own address may have a password in it
  const response = await fetch(url, { headers, signal, cache: "no-store" });
  if (response.status === 304) return { response, value: null };
  const value = await response.json().catch(() => null);
  if (!response.ok) throw new Refused(response.status, value?.error?.message ?? `status ${response.status}`);
  return { response, value };
}

/** The value at a path. */
export const get = async (path, signal) => (await ask(path, {}, signal)).value;

/** The value at a path, or null where it is the one that came last time. `slot` is what it is asked for. */
export async function changed(slot, path) {
  const known = tags.get(slot);
  const headers = known?.path === path ? { "if-none-match": known.tag } : {};
  const { response, value } = await ask(path, headers);
  if (value !== null) tags.set(slot, { path, tag: response.headers.get("etag") ?? "" });
  return value;
}

export const sessionPath = (id, rest = "") => `/sessions/${encodeURIComponent(id)}${rest}`;
