//! `dlock run`: runs a program while it holds a lock.
//!
//! Waiting -> running -> ended. A signal during the wait ends the wait and leaves
//! nothing behind. While the program runs, signals are passed on to it and the lock is
//! renewed. When the lock is lost, the program gets SIGTERM and, after
//! `--kill-after`, SIGKILL; with `--on-lost warn` it goes on. When the program has
//! ended, the lock is released, or stays held until `--hold-at-least` is over.
//!
//! Without a terminal the program leads its own process group and signals go to the
//! whole group, so that they also reach the processes that the program starts. With a
//! terminal the program stays in the process group of `dlock`, like a command of a
//! shell: Ctrl-C and Ctrl-Z of the terminal reach it without help, and a background
//! group could not read from the terminal.

use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::{Args, ValueEnum};
use dlock::{Dlock, ErrorKind, Guard, Key, MAX_TTL, ReleaseOutcome};
use dlock_bench::interrupt::is_ignored;
use rustix::process::{Pid, Signal, kill_process, kill_process_group, test_kill_process_group};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::{Common, exit_status, output};

/// Run a program while holding a lock
#[derive(Debug, Args)]
#[command(after_help = "\
The program gets the key in DLOCK_KEY and the fencing token in DLOCK_TOKEN. Send the
token with every write, so that the receiver can reject writes with an older token.

Signals are passed on to the program. Without a terminal (cron, systemd, a container)
they also go to the processes that the program has started, and so does the signal
that ends the program when the lock is lost. With a terminal only the program itself
gets them.

The lock is released when the program ends, even if processes that it started still
run. If dlock itself is killed by SIGKILL, the program goes on, and the lock ends with
its ttl: then only the token protects the data.

Exit status: that of the program; 75 if another client holds the lock, 76 if the lock
was lost while the program ran (not with --on-lost warn), 69 if the backend cannot be
reached, 126 if the program cannot be run, 127 if it is not found, 128 + n if signal n
ended it.

Examples:
  dlock run --url redis://localhost nightly-report -- ./report.sh
  dlock run --local nightly-report -- ./report.sh
  dlock run --wait 0s --hold-at-least 1h nightly-report -- ./report.sh
  dlock run --wait unlimited deploy:shop -- make deploy")]
pub(crate) struct Run {
    /// The key to lock
    key: String,
    /// How long the lock stays held after dlock was killed [default: 30s]
    #[arg(long, value_parser = humantime::parse_duration)]
    ttl: Option<Duration>,
    /// How long to wait for the lock: a duration, 0s to try once, or `unlimited` [default: 10s]
    #[arg(long, value_parser = parse_wait)]
    wait: Option<Wait>,
    /// Hold the lock for at least this long after the start, for jobs that must not run again too soon
    #[arg(long, value_parser = humantime::parse_duration)]
    hold_at_least: Option<Duration>,
    /// What happens to the program when the lock is lost
    #[arg(long, default_value = "kill")]
    on_lost: OnLost,
    /// The time between SIGTERM and SIGKILL when the lock is lost
    #[arg(long, default_value = "3s", value_parser = humantime::parse_duration)]
    kill_after: Duration,
    /// Do not print on standard error which store is used; for cron, which mails what is printed
    #[arg(long, short)]
    quiet: bool,
    /// The program and its arguments
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OnLost {
    /// End the program: SIGTERM, then SIGKILL
    Kill,
    /// Print a warning and let the program go on
    Warn,
}

#[derive(Clone, Copy, Debug)]
enum Wait {
    For(Duration),
    Unlimited,
}

fn parse_wait(value: &str) -> Result<Wait, humantime::DurationError> {
    match value {
        "unlimited" => Ok(Wait::Unlimited),
        "0" => Ok(Wait::For(Duration::ZERO)),
        value => humantime::parse_duration(value).map(Wait::For),
    }
}

impl Run {
    pub(crate) async fn run(self, common: &Common) -> Result<u8> {
        let key = Key::new(&self.key)?;
        if self.hold_at_least.is_some_and(|least| least > MAX_TTL) {
            return Err(dlock_bench::usage_error("--hold-at-least must be at most 24h"));
        }
        let mut signals = Signals::new()?;
        let dlock = common.connect().await?;
        if dlock.capabilities().name == "memory" {
            output::warn(
                "memory:// exists only inside this process, so no other process sees this lock; give --local to lock on this machine, or --url redis://host:port",
            );
        }
        if !self.quiet {
            output::warn(format!("`{}` in {}", self.key, dlock.store()));
        }
        let acquired = tokio::select! {
            acquired = self.acquire(&dlock, key) => acquired,
            signal = signals.next() => {
                output::warn(format!("ended by signal {} while waiting for `{}`", signal.as_raw(), self.key));
                dlock.shutdown(Duration::ZERO).await;
                return Ok(exit_status::ended_by(signal.as_raw()));
            }
        };
        let guard = match acquired {
            Ok(guard) => guard,
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                output::warn(error.to_string().replace(".wait(..)", "--wait"));
                return Ok(exit_status::BUSY);
            }
            Err(error) => return Err(error.into()),
        };
        let began = Instant::now();
        let status = self.run_program(&guard, &mut signals).await;
        let released = self.release(guard, began.elapsed()).await;
        dlock.shutdown(Duration::from_secs(1)).await;
        match released {
            Ok(ReleaseOutcome::Released) => {}
            Ok(ReleaseOutcome::AlreadyLost)
                if self.on_lost == OnLost::Kill && status != exit_status::LOST =>
            {
                output::warn(format!(
                    "`{}` was lost before the program ended (status {status}); check its writes by their token",
                    self.key
                ));
                return Ok(exit_status::LOST);
            }
            Ok(ReleaseOutcome::AlreadyLost) => {}
            Err(error) => output::warn(format!(
                "`{}` could not be released and stays held until its ttl is over: {error}",
                self.key
            )),
        }
        Ok(status)
    }

    async fn acquire(&self, dlock: &Dlock, key: Key) -> dlock::Result<Guard> {
        let mut lock = dlock.mutex(key);
        if let Some(program) = self.command.first() {
            lock = lock.tag("command", printable(program));
        }
        if let Some(ttl) = self.ttl {
            lock = lock.ttl(ttl);
        }
        match self.wait {
            Some(Wait::For(wait)) => lock = lock.wait(wait),
            Some(Wait::Unlimited) => lock = lock.wait_unlimited(),
            None => {}
        }
        lock.lock().await
    }

    /// Runs the program and returns the exit status.
    async fn run_program(&self, guard: &Guard, signals: &mut Signals) -> u8 {
        let Some((path, arguments)) = self.command.split_first() else { return 2 };
        let mut command = Command::new(path);
        command
            .args(arguments)
            .env("DLOCK_KEY", &self.key)
            .env("DLOCK_TOKEN", guard.token().to_string());
        let mut program = match Program::start(command) {
            Ok(program) => program,
            Err(error) => {
                output::warn(format!("cannot run {}: {error}", printable(path)));
                return match error.kind() {
                    std::io::ErrorKind::NotFound => exit_status::NOT_FOUND,
                    _ => exit_status::NOT_RUNNABLE,
                };
            }
        };
        let mut lost = false;
        loop {
            tokio::select! {
                ended = program.child.wait() => return ended.map_or(1, exit_status_of),
                signal = signals.next() => if !signals.reach_the_program_directly(signal) {
                    program.send(signal);
                },
                reason = guard.lost(), if !lost => {
                    lost = true;
                    output::warn(format!("`{}` was lost: {reason}", self.key));
                    if self.on_lost == OnLost::Kill {
                        self.end(&mut program).await;
                        return exit_status::LOST;
                    }
                }
            }
        }
    }

    /// Ends the program: SIGTERM, then SIGKILL.
    async fn end(&self, program: &mut Program) {
        program.send(Signal::TERM);
        if tokio::time::timeout(self.kill_after, program.ended()).await.is_err() {
            output::warn(format!(
                "the program did not end within {} after SIGTERM, so it is killed",
                output::short(self.kill_after)
            ));
            program.send(Signal::KILL);
            let _ = program.child.wait().await; // no process survives SIGKILL
        }
    }

    async fn release(&self, guard: Guard, ran: Duration) -> dlock::Result<ReleaseOutcome> {
        match self.hold_at_least.map(|least| least.saturating_sub(ran)) {
            Some(left) if !left.is_zero() => guard.release_after(left).await,
            _ => guard.release().await,
        }
    }
}

/// The path of the program without control characters, shortened.
fn printable(path: &OsString) -> String {
    let visible: String = path.to_string_lossy().chars().filter(|c| !c.is_control()).collect();
    visible.chars().take(60).collect()
}

/// The running program.
struct Program {
    child: Child,
    /// The process group that the program leads, if it has its own.
    group: Option<Pid>,
}

/// How often a process group is checked for its end.
const GROUP_CHECK_INTERVAL: Duration = Duration::from_millis(20);

impl Program {
    fn start(mut command: Command) -> std::io::Result<Self> {
        let has_terminal = std::fs::File::open("/dev/tty").is_ok();
        if !has_terminal {
            command.process_group(0);
        }
        let child = command.spawn()?;
        let group = if has_terminal { None } else { pid(&child) };
        Ok(Program { child, group })
    }

    /// Sends a signal to the process group, or to the program if it has no own group.
    /// They may have ended meanwhile.
    fn send(&self, signal: Signal) {
        let _ = match (self.group, pid(&self.child)) {
            (Some(group), _) => kill_process_group(group, signal),
            (None, Some(program)) => kill_process(program, signal),
            (None, None) => Ok(()),
        };
    }

    /// Waits until the program and its process group have ended.
    async fn ended(&mut self) {
        let _ = self.child.wait().await;
        while self.group.is_some_and(|group| test_kill_process_group(group).is_ok()) {
            tokio::time::sleep(GROUP_CHECK_INTERVAL).await;
        }
    }
}

/// The process id; `None` once the program has ended.
fn pid(child: &Child) -> Option<Pid> {
    Pid::from_raw(i32::try_from(child.id()?).ok()?)
}

fn exit_status_of(ended: ExitStatus) -> u8 {
    match (ended.code(), ended.signal()) {
        (Some(code), _) => u8::try_from(code & 0xff).unwrap_or(1),
        (None, Some(signal)) => exit_status::ended_by(signal),
        (None, None) => 1,
    }
}

/// The signals that are passed on to the program.
struct Signals {
    received: mpsc::Receiver<Signal>,
    /// Whether standard input is a terminal.
    has_terminal: bool,
}

impl Signals {
    fn new() -> Result<Self> {
        let (sender, received) = mpsc::channel(16);
        let passed_on =
            [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM, Signal::USR1, Signal::USR2];
        for passed in passed_on.into_iter().filter(|it| !is_ignored(it.as_raw())) {
            let mut signals = signal(SignalKind::from_raw(passed.as_raw()))?;
            let sender = sender.clone();
            tokio::spawn(async move {
                while signals.recv().await.is_some() {
                    if sender.send(passed).await.is_err() {
                        return;
                    }
                }
            });
        }
        Ok(Signals { received, has_terminal: std::io::stdin().is_terminal() })
    }

    /// Whether the program gets this signal without help: a terminal sends Ctrl-C to all
    /// processes in the foreground.
    fn reach_the_program_directly(&self, signal: Signal) -> bool {
        self.has_terminal && matches!(signal, Signal::INT | Signal::QUIT)
    }

    async fn next(&mut self) -> Signal {
        match self.received.recv().await {
            Some(signal) => signal,
            None => std::future::pending().await,
        }
    }
}
