//! Child processes that tests start, pause, resume and kill.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// The monotonic clock that all processes of the machine share, in nanoseconds.
pub fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// Pauses a process with SIGSTOP until [`resume`]. It must be a child that was not
/// waited for: its id is not used again, so no other process is paused.
pub fn pause(id: u32) {
    signal(id, Signal::STOP);
}

/// Resumes a paused child process with SIGCONT.
pub fn resume(id: u32) {
    signal(id, Signal::CONT);
}

fn signal(id: u32, signal: Signal) {
    if let Some(id) = i32::try_from(id).ok().and_then(Pid::from_raw) {
        let _ = kill_process(id, signal);
    }
}

/// A child process that reads commands from its standard input and prints events to
/// its standard output, one per line. It is killed when this value is dropped.
#[derive(Debug)]
pub struct ChildProcess {
    process: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    unread: Vec<String>,
}

impl ChildProcess {
    /// Starts a program with these arguments.
    ///
    /// # Panics
    /// If the program cannot be started.
    pub fn start(program: impl AsRef<OsStr>, arguments: &[&str]) -> Self {
        let mut process = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program can be run");
        let input = process.stdin.take().expect("its input");
        let output = process.stdout.take().expect("its output");
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        ChildProcess { process, input, lines, unread: Vec::new() }
    }

    /// Writes a line to the input of the process. Does nothing if the process is dead.
    pub fn send_line(&mut self, line: &str) {
        let _ = writeln!(self.input, "{line}");
        let _ = self.input.flush();
    }

    /// Waits for the first line for which `wanted` returns a value, and returns that
    /// value. Other lines stay unread.
    ///
    /// # Panics
    /// If there is no such line within 30 s.
    pub fn wait_for_line<T>(&mut self, what: &str, wanted: impl Fn(&str) -> Option<T>) -> T {
        let began = Instant::now();
        loop {
            let known = self.unread.iter().enumerate();
            let known = known.filter_map(|(place, line)| Some((place, wanted(line)?))).next();
            if let Some((place, found)) = known {
                self.unread.remove(place);
                return found;
            }
            let left = Duration::from_secs(30).saturating_sub(began.elapsed());
            let line = self.lines.recv_timeout(left);
            self.unread.push(line.unwrap_or_else(|_| {
                panic!("the process never printed {what}; it printed {:?}", self.unread);
            }));
        }
    }

    /// Takes all lines that were printed so far and not read yet.
    pub fn take_lines(&mut self) -> Vec<String> {
        self.unread.extend(self.lines.try_iter());
        std::mem::take(&mut self.unread)
    }

    /// Pauses the process with SIGSTOP.
    pub fn pause(&self) {
        pause(self.process.id());
    }

    /// Resumes the process.
    pub fn resume(&self) {
        resume(self.process.id());
    }

    /// Kills the process with SIGKILL, so that it cannot release any lock.
    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Whether the process is still running.
    pub fn is_running(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(None))
    }

    /// Waits for the process to exit. Returns whether it exited within this time and
    /// with success.
    pub fn wait_for_exit(&mut self, within: Duration) -> bool {
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

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.kill();
    }
}
