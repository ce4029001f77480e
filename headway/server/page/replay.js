// A recording in place of a server: each look is taken when its time has come, as fast or slow as the reader wants.

const SHOWN_MS = 100, BEFORE_MS = 60000; // how often it is looked for new ones, and how far back the view goes after a jump

class Player {
  constructor(looks) {
    this.looks = looks;
    this.first = looks[0].at_ms;
    this.last = looks[looks.length - 1].at_ms;
    [this.speed, this.isStill, this.next] = [1, false, 0];
    [this.at, this.since] = [this.first, performance.now()];
  }

  now() {
    return this.isStill ? this.at : Math.min(this.last, this.at + (performance.now() - this.since) * this.speed);
  }

  // What has passed by now stays as it is, whatever the speed from now on, or whether it is paused.
  settle() {
    this.at = this.now();
    this.since = performance.now();
    if (this.isStill && !paused && this.at >= this.last) this.jump(this.first);
    this.isStill = paused;
  }

  jump(at) {
    [rows, ended, steps, looks, latest] = [new Map(), [], [], [], null];
    this.at = at;
    this.since = performance.now();
    const from = this.looks.findIndex((each) => each.at_ms >= at - BEFORE_MS);
    about = this.looks.slice(0, from + 1).findLast((each) => each.about)?.about ?? about;
    this.next = Math.max(0, from);
    this.advance(at);
  }

  advance(now) {
    const before = this.next;
    while (this.next < this.looks.length && this.looks[this.next].at_ms <= now) gather(this.looks[this.next++]);
    if (this.next > before && latest) showLook();
    const seconds = (now - this.first) / 1000;
    if (document.activeElement !== $("position") || !paused) $("position").value = seconds;
    $("position").setAttribute("aria-valuetext", `${seconds.toFixed(1)} seconds`);
    $("position-said").textContent = `${seconds.toFixed(1)} of ${((this.last - this.first) / 1000).toFixed(1)} s`;
  }
}

function play(recording) {
  model = recording.model;
  $("model").textContent = `${model}, recorded`;
  document.title = `${model}, recorded – Headway`;
  document.querySelector("nav").hidden = true;
  $("live").hidden = $("player").hidden = false;
  $("position").max = (recording.looks[recording.looks.length - 1].at_ms - recording.looks[0].at_ms) / 1000;
  playing = new Player(recording.looks);
  playing.advance(playing.first);
  say("live-said", "Recorded");
  setInterval(() => {
    const now = playing.now();
    if (!playing.isStill) playing.advance(now);
    if (!paused && now >= playing.last) $("pause").click();
  }, SHOWN_MS);
  $("speed").addEventListener("change", () => {
    playing.settle();
    playing.speed = Number($("speed").value);
  });
  $("position").addEventListener("input", () => playing.jump(playing.first + 1000 * Number($("position").value)));
}

const recorded = document.getElementById("recording"); // which only a page with a recording has
if (recorded) play(JSON.parse(recorded.textContent));
else enter();
