// Requests to the gateway.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const last = new Map();

async function ask(path, signal) {
  const url = new URL(path, location.origin); // the page's own address may have a password in it
  const response = await fetch(url, { signal, cache: "no-store" });
  const text = await response.text();
  if (response.ok) return text;
  let message = `status ${response.status}`;
  try {
    message = JSON.parse(text).error.message;
  } catch {} // a proxy's page
  throw new Refused(response.status, message);
}

/** The value at a path. */
export const get = async (path, signal) => JSON.parse(await ask(path, signal));

/** The value at a path; null if it is the same as last time. `slot` names the use. */
export async function changed(slot, path) {
  const text = `${path} ${await ask(path)}`;
  if (last.get(slot) === text) return null;
  last.set(slot, text);
  return JSON.parse(text.slice(path.length + 1));
}

export const sessionPath = (id, suffix = "") => `/sessions/${encodeURIComponent(id)}${suffix}`;
