"use strict";
// Sorting, finding, and the exponents of one tensor: the page says the same without any of it.
const pictures = JSON.parse(document.getElementById("pictures").textContent);
const body = document.querySelector("tbody");
const rows = [...body.rows];

document.querySelectorAll("th button").forEach((button, column) => {
  button.addEventListener("click", () => {
    const head = button.parentElement;
    const down = head.getAttribute("aria-sort") !== "descending";
    document.querySelectorAll("th[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => row.cells[column].dataset.key;
    const order = column === 0 ? (a, b) => key(b).localeCompare(key(a), undefined, { numeric: true })
                               : (a, b) => key(b) - key(a);
    rows.sort((a, b) => (down ? order(a, b) : order(b, a)));
    body.append(...rows);
  });
});

document.querySelector(".find").addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase().split(/\s+/);
  for (const row of rows) {
    const name = row.cells[0].dataset.key.toLowerCase();
    row.hidden = !words.every((word) => name.includes(word));
  }
});

const chart = document.getElementById("exponents");
const caption = document.getElementById("exponents-of");
const pooled = chart && { html: chart.innerHTML, caption: caption.textContent };

function bar(i, width, height, kind, title) {
  const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  const sizes = { x: (i + 0.06) * width, y: 100 - height, width: width * 0.88, height };
  Object.entries(sizes).forEach(([name, value]) => rect.setAttribute(name, value));
  rect.setAttribute("class", kind);
  const label = document.createElementNS("http://www.w3.org/2000/svg", "title");
  label.textContent = title;
  rect.append(label);
  return rect;
}

function mark(kind, style, label, power) {
  const line = document.createElement("div");
  line.className = kind;
  Object.assign(line.style, style);
  const text = kind === "y" ? line.appendChild(document.createElement("span")) : line;
  text.append(label);
  if (power !== undefined) text.appendChild(document.createElement("sup")).append(power);
  return line;
}

function draw(name, [first, counts, inside, pooled]) {
  const top = Math.log10(Math.max(...counts) + 1);
  const height = (count) => 100 * Math.log10(count + 1) / top;
  const width = 100 / counts.length;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  const marks = [];
  for (let power = 0; power < top; power += top > 4 ? 2 : 1) {
    const label = 10 ** (power % 3) + ["", " k", " M", " B", " T"][Math.floor(power / 3)];
    marks.push(mark("y", { bottom: `${100 * power / top}%` }, label));
  }
  counts.forEach((count, i) => {
    if (!count) return;
    const title = `${pooled && !i ? "up to " : ""}2^${first + i - 127}: ${count.toLocaleString()} weights`;
    svg.append(bar(i, width, height(count), "out", title), bar(i, width, height(inside[i]), "in", title));
  });
  const every = Math.max(1, Math.round(counts.length / 10));
  for (let i = counts.length - 1, n = 0; i > (pooled ? 2 : -1); i -= every, n += 1) {
    marks.push(mark(n % 2 ? "t minor" : "t", { left: `${(i + 0.5) * width}%` }, "2", first + i - 127));
  }
  if (pooled) marks.push(mark("t", { left: 0, transform: "none" }, "0…"));
  chart.replaceChildren(...marks, svg);
  caption.textContent = name;
}

body.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button || !chart) return;
  const row = button.closest("tr");
  const again = row.classList.contains("shown");
  rows.forEach((other) => other.classList.remove("shown"));
  const picture = pictures[row.dataset.at];
  if (again || !picture.length) {
    chart.innerHTML = pooled.html;
    caption.textContent = pooled.caption;
    return;
  }
  row.classList.add("shown");
  draw(button.textContent, picture);
  chart.closest("section").scrollIntoView({ behavior: "smooth", block: "nearest" });
});
