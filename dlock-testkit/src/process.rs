//! Processes that tests start, stop in their tracks, and kill.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Nanoseconds of a clock that all processes of the machine share.
pub fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// Stops a process in its tracks, until [`resume`]. It must be a child that was
/// not waited for: such a one keeps its id, so nobody else is hit.
pub fn pause(id: u32) {
    signal(id, Signal::STOP);
}

/// Lets a stopped child go on.
pub fn resume(id: u32) {
    signal(id, Signal::CONT);
}

fn signal(id: u32, signal: Signal) {
    if let Some(id) = i32::try_from(id).ok().and_then(Pid::from_raw) {
        let _ = kill_process(id, signal);
    }
}

/// A program that is told what to do in lines and tells what happens in lines.
/// Killed when dropped.
#[derive(Debug)]
pub struct Puppet {
    process: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    heard: Vec<String>,
}

impl Puppet {
    /// Starts a program.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start(program: impl AsRef<OsStr>, arguments: &[&str]) -> Self {
        let mut process = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program can be run");
        let input = process.stdin.take().expect("its input");
        let output = process.stdout.take().expect("its output");
        let (told, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if told.send(line).is_err() {
                    return;
                }
            }
        });
        Puppet { process, input, lines, heard: Vec::new() }
    }

    /// Tells it something. One that is dead hears nothing.
    pub fn tell(&mut self, line: &str) {
        let _ = writeln!(self.input, "{line}");
        let _ = self.input.flush();
    }

    /// The next line for which `wanted` has an answer; others are kept for later.
    ///
    /// # Panics
    /// If none comes in half a minute.
    pub fn hear<T>(&mut self, what: &str, wanted: impl Fn(&str) -> Option<T>) -> T {
        let began = Instant::now();
        loop {
            let known = self.heard.iter().enumerate();
            let known = known.filter_map(|(place, line)| Some((place, wanted(line)?))).next();
            if let Some((place, found)) = known {
                self.heard.remove(place);
                return found;
            }
            let left = Duration::from_secs(30).saturating_sub(began.elapsed());
            let line = self.lines.recv_timeout(left);
            self.heard.push(line.unwrap_or_else(|_| {
                panic!("{what} was never told; it said {:?}", self.heard);
            }));
        }
    }

    /// Every line so far that was not asked for.
    pub fn rest(&mut self) -> Vec<String> {
        self.heard.extend(self.lines.try_iter());
        std::mem::take(&mut self.heard)
    }

    /// Stops it in its tracks.
    pub fn pause(&self) {
        pause(self.process.id());
    }

    /// Lets it go on.
    pub fn resume(&self) {
        resume(self.process.id());
    }

    /// Kills it: it has no chance to let go of anything.
    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Whether it has not ended.
    pub fn is_running(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(None))
    }

    /// Waits for it to end by itself; whether it did so in time, and well.
    pub fn ended(&mut self, within: Duration) -> bool {
        let began = Instant::now();
        while began.elapsed() < within {
            if let Ok(Some(status)) = self.process.try_wait() {
                return status.success();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }
}

impl Drop for Puppet {
    fn drop(&mut self) {
        self.kill();
    }
}
