(() => {
  const root = document.querySelector("main.tt");

  const dark = matchMedia("(prefers-color-scheme: dark)");
  root.querySelector(".tt-theme").addEventListener("click", () => {
    const page = document.documentElement;
    page.dataset.theme = (page.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark" ? "light" : "dark";
  });

  // what follows is for the page of one rendering, which carries what its tooltips say
  const found = document.getElementById("tt-data");
  if (!found) return;
  const data = JSON.parse(found.textContent);
  const tip = document.querySelector(".tt-tip");
  const spans = [...root.querySelectorAll(".tt-tokens s")];
  const order = new Map(spans.map((span, at) => [span, at]));

  const row = (list, name, value) => {
    const dt = document.createElement("dt");
    const dd = document.createElement("dd");
    dt.textContent = name;
    dd.textContent = value;
    list.append(dt, dd);
  };

  const describe = (token) => {
    const [start, message, kind, field, sampled] = data.pieces[order.get(token.parentNode)];
    const at = start + [...token.parentNode.children].indexOf(token);
    const id = data.ids[at];
    const code = document.createElement("code");
    const list = document.createElement("dl");
    const text = data.texts[id];
    code.textContent = JSON.stringify(text);
    row(list, "id", id);
    row(list, "position", at);
    row(list, "message", message < 0 ? "none" : `${message} (${data.roles[message]})`);
    row(list, "field", data.fields[field]);
    row(list, "origin", data.kinds[kind]);
    row(list, "sampled", sampled ? "yes" : "no");
    if (text.includes("\ufffd")) row(list, "note", "part of a character");
    tip.replaceChildren(code, list);
  };

  root.addEventListener("mousemove", (event) => {
    const token = event.target.closest(".tt-tokens i, .tt-tokens b");
    tip.hidden = !token;
    if (!token) return;
    if (tip.token !== token) {
      tip.token = token;
      describe(token);
    }
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - box.width - 10)}px`;
    const below = event.clientY + 18;
    tip.style.top = `${below + box.height > innerHeight ? event.clientY - box.height - 12 : below}px`;
  });
  root.addEventListener("mouseleave", () => { tip.hidden = true; });

  const legend = root.querySelector(".tt-legend");
  legend.dataset.live = "";
  legend.addEventListener("click", (event) => {
    const item = event.target.closest("li");
    if (!item) return;
    const picked = !item.classList.contains("picked");
    for (const other of legend.children) other.classList.toggle("picked", other === item && picked);
    for (const span of spans) span.classList.toggle("off", picked && !span.classList.contains("k" + item.dataset.k));
  });
})();
