// Tooltips of points.

/** Show the tooltip of the nearest point for the mouse, touch or arrow keys. */
function hoverable(svg, spots, reach = 34) {
  if (!spots.length) return;
  const order = [...spots].sort((a, b) => a.cx - b.cx || a.cy - b.cy);
  let halo = null,
    current = -1;
  const show = (spot) => {
    halo?.remove();
    halo = spot.box
      ? shape("rect", { class: "halo", ...spot.box })
      : shape("circle", { class: "halo", cx: spot.cx, cy: spot.cy, r: 8 });
    svg.append(halo);
    const frame = svg.getBoundingClientRect();
    showTip(
      spot.tip,
      frame.left + spot.cx * (frame.width / svg.viewBox.baseVal.width),
      frame.top + spot.cy * (frame.height / svg.viewBox.baseVal.height),
    );
  };
  const hide = () => {
    halo?.remove();
    halo = null;
    hideTip();
  };
  const nearest = (event) => {
    const frame = svg.getBoundingClientRect(),
      factor = svg.viewBox.baseVal.width / frame.width;
    const px = (event.clientX - frame.left) * factor,
      py = (event.clientY - frame.top) * factor;
    let best = null,
      distance = reach;
    for (const spot of order) {
      const inside =
        spot.box &&
        px >= spot.box.x &&
        px <= spot.box.x + spot.box.width &&
        py >= spot.box.y &&
        py <= spot.box.y + spot.box.height;
      const away = inside
        ? 0
        : spot.box
          ? Infinity
          : Math.hypot(spot.cx - px, spot.cy - py) + (spot.series?.context ? 8 : 0);
      if (away < distance) [best, distance] = [spot, away];
    }
    if (best) {
      current = order.indexOf(best);
      show(best);
    } else hide();
  };
  svg.addEventListener("pointermove", nearest);
  svg.addEventListener("pointerdown", nearest);
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step) return;
    event.preventDefault();
    current = (current + step + order.length + (current < 0 && step < 0 ? 1 : 0)) % order.length;
    show(order[current]);
  });
}

function showTip([head, ...lines], x, y) {
  const tip = document.getElementById("tip");
  tip.replaceChildren(element("b", {}, head), ...lines.map((line) => element("div", {}, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, x + 14), innerWidth - box.width - 8);
  const above = y - box.height - 14;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : Math.min(y + 18, innerHeight - box.height - 8)}px`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}
