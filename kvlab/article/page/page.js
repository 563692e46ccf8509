// The table of contents follows the scroll; on a narrow screen it starts folded.
(() => {
  const links = new Map([...document.querySelectorAll("#toc a")].map(a => [decodeURIComponent(a.hash.slice(1)), a]));
  const headings = [...links.keys()].map(id => document.getElementById(id)).filter(Boolean);
  if (matchMedia("(max-width: 70rem)").matches) document.querySelector("#toc details").open = false;
  let queued = false;
  const follow = () => {
    queued = false;
    const current = headings.filter(h => h.getBoundingClientRect().top < innerHeight * 0.25).pop() || headings[0];
    links.forEach((a, id) => current && id === current.id ? a.setAttribute("aria-current", "true") : a.removeAttribute("aria-current"));
  };
  addEventListener("scroll", () => { if (!queued) { queued = true; requestAnimationFrame(follow); } }, { passive: true });
  follow();
})();
