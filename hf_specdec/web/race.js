// The replay of both answers at their true speed, the tooltip of a token, and links. Everything needed is in the spans.
(() => {
  "use strict";
  let race = 0; // the number of the race that runs; an older one, whose tokens are hidden again, ends when it sees it

  const panes = () => ["sd-off", "sd-on"].map((id) => document.getElementById(id)).filter(Boolean);

  function prepare(pane) {
    const text = pane.querySelector(".sd-text[data-end]");
    if (!text) return null;
    const tokens = [...text.querySelectorAll(".sd-t")];
    return {
      text, tokens, times: tokens.map((token) => Number(token.dataset.t)), end: Number(text.dataset.end), next: 0,
      speed: pane.querySelector("[data-speed]"), clock: pane.querySelector("[data-clock]"),
    };
  }

  function show(side, seconds) {
    while (side.next < side.tokens.length && side.times[side.next] <= seconds) {
      side.tokens[side.next++].classList.remove("sd-wait");
    }
    const now = Math.min(seconds, side.end);
    side.clock.textContent = now.toFixed(2);
    side.speed.textContent = side.next ? (side.next / now).toFixed(1) : "–";
    return seconds >= side.end;
  }

  function play(onOpening) {
    if (onOpening && window.matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    const sides = panes().map(prepare).filter(Boolean);
    if (sides.length < 2) return;
    const mine = ++race;
    for (const side of sides) for (const token of side.tokens) token.classList.add("sd-wait");
    const begin = performance.now();
    document.body.dataset.sdRace = "running";
    const frame = () => {
      if (mine !== race) return;
      const gone = sides.some((side) => !side.text.isConnected);
      const seconds = gone ? Infinity : (performance.now() - begin) / 1000;
      const ended = sides.map((side) => show(side, seconds)).every(Boolean);
      if (!ended) requestAnimationFrame(frame);
      else document.body.dataset.sdRace = "done";
    };
    requestAnimationFrame(frame);
  }

  // Tooltip: for the mouse, for a finger, and with the arrow keys in a pane that has the focus.
  let tip = null;

  function about(token) {
    if (!tip) {
      tip = document.createElement("div");
      tip.id = "sd-tip";
      tip.setAttribute("role", "tooltip");
      tip.setAttribute("aria-live", "polite"); // the arrow keys move no focus that a screen reader could follow
      document.body.append(tip);
    }
    document.querySelectorAll(".sd-active").forEach((each) => each.classList.remove("sd-active"));
    tip.hidden = !token;
    if (!token) return;
    token.classList.add("sd-active");
    tip.textContent = token.dataset.tip;
    moveTo(token);
  }

  function moveTo(token) {
    const place = token.getBoundingClientRect();
    const left = Math.max(4, Math.min(place.left, window.innerWidth - tip.offsetWidth - 4));
    const above = place.top - tip.offsetHeight - 6;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 0 ? above : place.bottom + 6}px`;
  }

  const tokenAt = (event) => (event.target instanceof Element ? event.target.closest(".sd-text .sd-t[data-tip]") : null);
  document.addEventListener("mouseover", (event) => about(tokenAt(event)));
  document.addEventListener("click", (event) => about(tokenAt(event)));
  document.addEventListener("scroll", () => {
    const token = document.querySelector(".sd-active");
    if (token) moveTo(token);
    else if (tip) tip.hidden = true;
  }, true);
  document.addEventListener("focusout", () => about(null));
  document.addEventListener("keydown", (event) => {
    const text = event.target instanceof Element ? event.target.closest(".sd-text") : null;
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") about(null);
    if (!text || !step) return;
    const tokens = [...text.querySelectorAll(".sd-t")];
    const now = tokens.findIndex((token) => token.classList.contains("sd-active"));
    const token = tokens[Math.max(0, Math.min(tokens.length - 1, now + step))];
    token.scrollIntoView({ block: "nearest" });
    about(token);
    event.preventDefault();
  });

  // On a phone the panes are far below the button.
  function look() {
    const headline = document.getElementById("sd-headline");
    const { top, bottom } = headline.getBoundingClientRect();
    if (top < 0 || bottom > window.innerHeight) headline.scrollIntoView();
  }

  // A link to other settings, put into the address of a page that is open, changes what stands behind the # alone.
  window.addEventListener("hashchange", () => window.location.reload());

  window.hfSpecdec = { play, look };
})();
