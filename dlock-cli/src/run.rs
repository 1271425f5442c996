//! `dlock run`: a program under a lock, on any machine.
//!
//! Waiting -> running -> ended. A signal while waiting ends the wait and leaves
//! nothing behind. While the program runs, signals are passed on to it and the
//! lock is renewed; when the lock is lost the program is told to end (SIGTERM) and
//! made to end (SIGKILL) after a while, or, with `--on-lost warn`, goes on. When
//! it has ended the lock is given back, or stays taken until `--hold-at-least`.
//!
//! What the program starts is meant too: the program leads a process group of its own
//! and the group is signalled. With a terminal it stays in the group of this process,
//! as a command of a shell would: the terminal's Ctrl-C and Ctrl-Z reach it by
//! themselves, and a group in the background could not read from the terminal.

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

use crate::{Common, output, status};

/// Run a program under a lock
#[derive(Debug, Args)]
#[command(after_help = "\
The program finds the key in DLOCK_KEY and the fencing token in DLOCK_TOKEN: send
the token along with every write, so that the receiver can refuse an older one.
Signals are passed on to it. Without a terminal (cron, systemd, a container) the
program has a process group of its own, and what it has started is signalled with it,
also when the lock is lost; started from a terminal only the program itself is. The
lock is given back when the program ends, whatever it leaves running. Should dlock
itself be killed by SIGKILL, the program goes on without the lock once its ttl is
over; the token tells.

Exit status: the program's own; 75 when somebody else holds the lock, 76 when the
lock was lost while the program ran (not with --on-lost warn), 69 when the backend
cannot be reached, 126 and 127 when the program cannot be run or found, 128 + n
when signal n ended it.

Examples:
  dlock run nightly-report -- ./report.sh
  dlock run --wait 0s --hold-at-least 1h nightly-report -- ./report.sh
  dlock run --wait unlimited deploy:shop -- make deploy")]
pub(crate) struct Run {
    /// The key
    key: String,
    /// How long the lock outlives a dlock that was killed [default: 30s]
    #[arg(long, value_parser = humantime::parse_duration)]
    ttl: Option<Duration>,
    /// How long to wait for the lock: 0s tries once, `unlimited` [default: 10s]
    #[arg(long, value_parser = wait)]
    wait: Option<Wait>,
    /// Keep the key taken at least this long from the start on, for jobs that must not run twice
    #[arg(long, value_parser = humantime::parse_duration)]
    hold_at_least: Option<Duration>,
    /// What happens to the program when the lock is lost
    #[arg(long, default_value = "kill")]
    on_lost: OnLost,
    /// How long the program has to end after SIGTERM before SIGKILL
    #[arg(long, default_value = "3s", value_parser = humantime::parse_duration)]
    kill_after: Duration,
    /// The program and its arguments
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OnLost {
    /// End it: SIGTERM, then SIGKILL
    Kill,
    /// Say so and let it go on
    Warn,
}

#[derive(Clone, Copy, Debug)]
enum Wait {
    For(Duration),
    Unlimited,
}

fn wait(text: &str) -> Result<Wait, humantime::DurationError> {
    match text {
        "unlimited" => Ok(Wait::Unlimited),
        "0" => Ok(Wait::For(Duration::ZERO)),
        text => humantime::parse_duration(text).map(Wait::For),
    }
}

impl Run {
    pub(crate) async fn run(self, common: &Common) -> Result<u8> {
        let key = Key::new(&self.key)?;
        if self.hold_at_least.is_some_and(|least| least > MAX_TTL) {
            return Err(dlock_bench::usage_error("--hold-at-least takes a day (24h) at most"));
        }
        let mut signals = Signals::new()?;
        let dlock = common.connect().await?;
        if dlock.capabilities().name == "memory" {
            output::warn("memory:// is inside this process: nobody else will see this lock");
        }
        let taken = tokio::select! {
            taken = self.take(&dlock, key) => taken,
            signal = signals.next() => {
                output::warn(format!("ended by signal {} before the lock was taken", signal.as_raw()));
                dlock.shutdown(Duration::ZERO).await;
                return Ok(status::ended_by(signal.as_raw()));
            }
        };
        let guard = match taken {
            Ok(guard) => guard,
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                output::warn(&error);
                return Ok(status::BUSY);
            }
            Err(error) => return Err(error.into()),
        };
        let began = Instant::now();
        let status = self.under(&guard, &mut signals).await;
        let released = self.release(guard, began.elapsed()).await;
        dlock.shutdown(Duration::from_secs(1)).await;
        match released {
            Ok(ReleaseOutcome::Released) => {}
            Ok(ReleaseOutcome::AlreadyLost)
                if self.on_lost == OnLost::Kill && status != status::LOST =>
            {
                output::warn(format!(
                    "`{}` was lost before the program ended, which was with status {status}; check what it did by its token",
                    self.key
                ));
                return Ok(status::LOST);
            }
            Ok(ReleaseOutcome::AlreadyLost) => {}
            Err(error) => output::warn(format!("the lock ends by its ttl: {error}")),
        }
        Ok(status)
    }

    async fn take(&self, dlock: &Dlock, key: Key) -> dlock::Result<Guard> {
        let mut lock = dlock.mutex(key);
        if let Some(program) = self.command.first() {
            lock = lock.tag("command", shown(program));
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

    /// Runs the program; answers with what to end.
    async fn under(&self, guard: &Guard, signals: &mut Signals) -> u8 {
        let Some((program, arguments)) = self.command.split_first() else { return 2 };
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env("DLOCK_KEY", &self.key)
            .env("DLOCK_TOKEN", guard.token().to_string());
        let mut started = match Program::start(command) {
            Ok(started) => started,
            Err(error) => {
                output::warn(format!("cannot run {}: {error}", shown(program)));
                return match error.kind() {
                    std::io::ErrorKind::NotFound => status::NOT_FOUND,
                    _ => status::NOT_RUNNABLE,
                };
            }
        };
        let mut lost = false;
        loop {
            tokio::select! {
                ended = started.child.wait() => return ended.map_or(1, of_child),
                signal = signals.next() => if !signals.is_with_the_program(signal) {
                    started.send(signal);
                },
                reason = guard.lost(), if !lost => {
                    lost = true;
                    output::warn(format!("`{}` was lost: {reason}", self.key));
                    if self.on_lost == OnLost::Kill {
                        self.end(&mut started).await;
                        return status::LOST;
                    }
                }
            }
        }
    }

    /// Makes the program end.
    async fn end(&self, program: &mut Program) {
        program.send(Signal::TERM);
        if tokio::time::timeout(self.kill_after, program.ended()).await.is_err() {
            output::warn(format!(
                "it did not end within {}, so it is killed",
                output::short(self.kill_after)
            ));
            program.send(Signal::KILL);
            let _ = program.child.wait().await; // nothing outlives SIGKILL
        }
    }

    async fn release(&self, guard: Guard, ran: Duration) -> dlock::Result<ReleaseOutcome> {
        match self.hold_at_least.map(|least| least.saturating_sub(ran)) {
            Some(left) if !left.is_zero() => guard.release_after(left).await,
            _ => guard.release().await,
        }
    }
}

fn shown(program: &OsString) -> String {
    let text: String = program.to_string_lossy().chars().filter(|c| !c.is_control()).collect();
    text.chars().take(60).collect()
}

/// The program as it runs.
struct Program {
    child: Child,
    /// The group that it leads.
    group: Option<Pid>,
}

/// How often it is looked whether a group has ended.
const LOOK: Duration = Duration::from_millis(20);

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

    /// Sends to all of the group, or to the program. They may have ended meanwhile.
    fn send(&self, signal: Signal) {
        let _ = match (self.group, pid(&self.child)) {
            (Some(group), _) => kill_process_group(group, signal),
            (None, Some(program)) => kill_process(program, signal),
            (None, None) => Ok(()),
        };
    }

    /// Waits until the program, and its group, have ended.
    async fn ended(&mut self) {
        let _ = self.child.wait().await;
        while self.group.is_some_and(|group| test_kill_process_group(group).is_ok()) {
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// `None` once it has ended.
fn pid(child: &Child) -> Option<Pid> {
    Pid::from_raw(i32::try_from(child.id()?).ok()?)
}

fn of_child(ended: ExitStatus) -> u8 {
    match (ended.code(), ended.signal()) {
        (Some(code), _) => u8::try_from(code & 0xff).unwrap_or(1),
        (None, Some(signal)) => status::ended_by(signal),
        (None, None) => 1,
    }
}

/// The signals that are passed on.
struct Signals {
    seen: mpsc::Receiver<Signal>,
    /// A terminal sends its own to the program too.
    terminal: bool,
}

impl Signals {
    fn new() -> Result<Self> {
        let (tell, seen) = mpsc::channel(16);
        let passed_on =
            [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM, Signal::USR1, Signal::USR2];
        for passed in passed_on.into_iter().filter(|it| !is_ignored(it.as_raw())) {
            let mut coming = signal(SignalKind::from_raw(passed.as_raw()))?;
            let tell = tell.clone();
            tokio::spawn(async move {
                while coming.recv().await.is_some() {
                    if tell.send(passed).await.is_err() {
                        return;
                    }
                }
            });
        }
        Ok(Signals { seen, terminal: std::io::stdin().is_terminal() })
    }

    /// Whether the program has been sent it already: Ctrl-C on a terminal goes to
    /// everything that runs in the foreground.
    fn is_with_the_program(&self, signal: Signal) -> bool {
        self.terminal && matches!(signal, Signal::INT | Signal::QUIT)
    }

    async fn next(&mut self) -> Signal {
        match self.seen.recv().await {
            Some(signal) => signal,
            None => std::future::pending().await,
        }
    }
}
