// The one dialogue by which this page changes anything: it says what will happen, asks for the
// credential of an admin, and sends both to the master. This module alone keeps the credential.

import { say } from "./parts.js";

const $ = (id) => document.getElementById(id);
let credential = "";
let wish = null;

// {title, what, name, path, body, done(answer)}; `done` words what was done.
export function change(asked) {
  wish = asked;
  say($("change-title"), asked.title);
  say($("change-what"), asked.what);
  say($("change-do"), asked.name);
  say($("change-refused"), "");
  $("credential").value = credential;
  $("change-do").disabled = false;
  $("change").showModal();
}

export function makeChanges() {
  $("change-cancel").addEventListener("click", () => $("change").close());
  $("change").addEventListener("close", () => { $("credential").value = ""; });
  $("change").querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
}

async function send() {
  const asked = wish, given = $("credential").value.trim();
  if (!/^[\x21-\x7e]+$/.test(given)) return refused("A credential has no such characters.");
  $("change-do").disabled = true;
  try {
    const answer = await fetch(asked.path, {
      method: "POST",
      headers: {
        "Content-Type": "application/json", Authorization: `Bearer ${given}`,
      },
      body: JSON.stringify(asked.body),
    });
    const told = await answer.text();
    if (!answer.ok) return refused(why(told, answer.status));
    credential = given;
    $("change").close();
    $("done").hidden = false;
    say($("done"), asked.done(JSON.parse(told)));
  } catch (error) {
    refused(`The master was not reached: ${error.message}`);
  }
}

function why(told, status) {
  try {
    const { error } = JSON.parse(told);
    return `Refused: ${error.message}${error.advice ? `; ${error.advice}` : ""}`;
  } catch {
    return `Refused (${status}): ${told.slice(0, 300)}`;
  }
}

function refused(text) {
  $("change-do").disabled = false;
  say($("change-refused"), text);
}
