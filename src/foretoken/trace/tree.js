// Draws token trees. A node: label, id, parent (-1 of the root), kind (accepted, corrected, bonus, plain or rejected), and
// own for the token that was not drafted. figures(node): what is written below its label, and what its title adds.
const SVG = "http://www.w3.org/2000/svg";
const COLUMN = 160, ROW = 54, WIDTH = 132, HEIGHT = 42, MARGIN = 12;
function element(name, attributes, content) {
  const made = name === "svg" || attributes.svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (key !== "svg") made.setAttribute(key, value);
  if (content !== undefined) made.textContent = content;
  return made;
}
function visible(label) {
  const shown = label.replaceAll("\n", "\u23ce").replaceAll("\t", "\u21e5").replaceAll("\r", "\u240d").replaceAll(" ", "\u2423");
  return shown.length > 14 ? shown.slice(0, 13) + "\u2026" : shown;
}
function drawnTree(nodes, figures) {
  const below = nodes.map(() => []);
  nodes.forEach((node, i) => { if (node.parent >= 0) below[node.parent].push(i); });
  for (let i = 0; i < nodes.length; i++) nodes[i].depth = nodes[i].parent < 0 ? 0 : nodes[nodes[i].parent].depth + 1;
  let rows = 0;
  const stack = [0], order = [];
  while (stack.length) { const i = stack.pop(); order.push(i); stack.push(...below[i].slice().reverse()); }
  for (const i of order) if (!below[i].length) nodes[i].row = rows++;
  for (const i of order.reverse()) if (below[i].length) nodes[i].row = nodes[below[i][0]].row;
  const deepest = nodes.reduce((most, node) => Math.max(most, node.depth), 0);
  const width = deepest * COLUMN + WIDTH + 2 * MARGIN, height = rows * ROW + 2 * MARGIN;
  const svg = element("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "The drafted tree" });
  const x = (node) => MARGIN + node.depth * COLUMN, y = (node) => MARGIN + node.row * ROW;
  for (const node of nodes) {
    if (node.parent < 0) continue;
    const from = nodes[node.parent], x0 = x(from) + WIDTH, y0 = y(from) + HEIGHT / 2, x1 = x(node), y1 = y(node) + HEIGHT / 2;
    const middle = (x0 + x1) / 2;
    svg.append(element("path", { svg: 1, class: node.kind, d: `M${x0} ${y0} C${middle} ${y0} ${middle} ${y1} ${x1} ${y1}` }));
  }
  for (const node of nodes) {
    const group = element("g", { svg: 1, class: node.kind, transform: `translate(${x(node)} ${y(node)})` });
    const what = node.parent < 0 ? "last token so far" : node.own ? node.kind : node.kind === "accepted" ? "drafted and accepted" : "drafted, not accepted";
    const [under, more] = figures(node);
    group.append(
      element("title", { svg: 1 }, `${JSON.stringify(node.label)} (id ${node.id}): ${what}${more}`),
      element("rect", { svg: 1, width: WIDTH, height: HEIGHT, rx: 5 }),
      element("text", { svg: 1, x: 8, y: 18 }, visible(node.label)),
      element("text", { svg: 1, x: 8, y: 34, class: "figures" }, node.parent < 0 ? "so far" : under),
    );
    svg.append(group);
  }
  return svg;
}
