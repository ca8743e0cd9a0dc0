// Save plots as files.

// Style properties that an SVG needs outside the page.
const LOOKS = [
  "fill",
  "stroke",
  "stroke-width",
  "stroke-dasharray",
  "stroke-linejoin",
  "stroke-linecap",
  "opacity",
  "fill-opacity",
  "font-family",
  "font-size",
  "font-weight",
];

/** A copy of a plot that does not depend on the style of the page. */
function standalone(svg) {
  const copy = svg.cloneNode(true);
  const originals = [svg, ...svg.querySelectorAll("*")],
    copies = [copy, ...copy.querySelectorAll("*")];
  copies.forEach((node, i) => {
    const look = getComputedStyle(originals[i]);
    for (const name of LOOKS) node.setAttribute(name, look.getPropertyValue(name));
    node.removeAttribute("class");
  });
  copy.querySelectorAll("g").forEach((group) => group.setAttribute("opacity", "1"));
  copy.setAttribute("xmlns", SVG);
  copy.removeAttribute("tabindex");
  const ground = getComputedStyle(document.body).getPropertyValue("--card").trim();
  copy.prepend(shape("rect", { width: "100%", height: "100%", fill: ground, stroke: "none" }));
  return new XMLSerializer().serializeToString(copy);
}

function download(blob, name) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function saveSvg(svg, name) {
  download(new Blob([standalone(svg)], { type: "image/svg+xml" }), `${name}.svg`);
}

/** Save a plot as an image of twice its size, for printing. */
async function savePng(svg, name) {
  const picture = new Image();
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standalone(svg))}`;
  await picture.decode();
  const paper = element("canvas", {
    width: 2 * svg.viewBox.baseVal.width,
    height: 2 * svg.viewBox.baseVal.height,
  });
  paper.getContext("2d").drawImage(picture, 0, 0, paper.width, paper.height);
  paper.toBlob((blob) => download(blob, `${name}.png`), "image/png");
}
