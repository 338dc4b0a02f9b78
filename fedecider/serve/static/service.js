// The service, asked with the key that the page was told, if any.

let key = "";

export const useKey = (text) => { key = text; };

export class Refusal extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

async function asked(path, options = {}) {
  const headers = { ...options.headers, ...(key ? { "X-API-Key": key } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "the service cannot be reached");
  }
  const content = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refusal(response.status, content.detail || `the service answered ${response.status}`);
  return content;
}

export const needsKey = async () => (await asked("health")).needs_key && !key;

export const domains = () => asked("domains");

export async function items(domain, query, signal) {
  const words = new URLSearchParams({ domain, query, limit: "10" });
  return (await asked(`items?${words}`, { signal })).items;
}

export function recommend(request) {
  const headers = { "Content-Type": "application/json" };
  return asked("recommend", { method: "POST", headers, body: JSON.stringify(request) });
}
