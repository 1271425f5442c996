//! What is printed on a terminal and not into a pipe: colours, progress bars, and a screen
//! that is redrawn.

mod support;

use std::process::Command;

use support::{PROGRAM, dlock, output, printed, status};

/// What the program prints on a terminal; `None` if the command `script`, which makes one,
/// is missing.
fn on_a_terminal(arguments: &str, environment: &[(&str, &str)]) -> Option<String> {
    let there = Command::new("script").arg("--version").output().is_ok();
    if !dlock_testkit::servers::found("script", there) {
        return None;
    }
    let program = dlock();
    let line = format!("{PROGRAM} {arguments}");
    let mut terminal = Command::new("script");
    terminal.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
    terminal.env("TERM", "xterm").env_remove("NO_COLOR").env_remove("CI");
    for (name, change) in program.get_envs() {
        if change.is_none() {
            terminal.env_remove(name);
        }
    }
    let shown = terminal.envs(environment.iter().copied()).output().expect("script can be run");
    assert_eq!(status(&shown), 0, "{}", printed(&shown));
    Some(printed(&shown))
}

const COLOUR: &str = "\x1b[";
const SALE: &str = "sale --stock 300 --buyers 600 --segments 4";

#[test]
fn a_sale_on_a_terminal_has_bars_and_colours() {
    let Some(shown) = on_a_terminal(SALE, &[]) else { return };
    assert!(shown.contains("buyers served"), "bars: {shown:?}");
    let table = shown.lines().find(|line| line.contains("OVERSOLD"));
    assert!(table.is_some(), "the table comes after the bars: {shown:?}");
    assert!(shown.contains("\x1b[2m"), "{shown:?}");
}

#[test]
fn no_color_means_none() {
    let Some(shown) = on_a_terminal("watch --url memory:// --count 2 --every 50ms", &[]) else {
        return;
    };
    assert!(shown.contains("\x1b[2m0 held, 0 waiting"), "{shown:?}");
    assert_eq!(shown.matches("\x1b[2J").count(), 2, "it is redrawn: {shown:?}");
    let Some(shown) = on_a_terminal("inventory --help", &[("NO_COLOR", "1")]) else { return };
    assert!(!shown.contains(COLOUR), "{shown:?}");
    let Some(shown) = on_a_terminal("health --url memory://", &[("NO_COLOR", "1")]) else { return };
    assert!(!shown.contains(COLOUR), "{shown:?}");
}

#[test]
fn a_pipe_gets_plain_text() {
    let watch = ["watch", "--url", "memory://", "--count", "2", "--every", "50ms"];
    let text = printed(&output(&mut dlock(), &watch));
    assert_eq!(text.matches("0 held, 0 waiting").count(), 2, "{text:?}");
    assert!(!text.contains('\x1b'), "{text:?}");
}

#[test]
fn a_program_reads_from_the_terminal() {
    let there = Command::new("script").arg("--version").output().is_ok();
    if !dlock_testkit::servers::found("script", there) {
        return;
    }
    let line = format!("{PROGRAM} run --url memory:// k -- sh -c 'read word; echo got:$word:'");
    let mut terminal = Command::new("script");
    terminal.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
    let mut running = terminal
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("script can be run");
    let mut keyboard = running.stdin.take().expect("its keyboard");
    std::io::Write::write_all(&mut keyboard, b"hello\n").expect("typed");
    let shown = running.wait_with_output().expect("its end");
    assert!(printed(&shown).contains("got:hello:"), "{}", printed(&shown));
}
