//! Why a lock has a token: a holder is paused, its lock goes to somebody else, it
//! wakes up and writes. The account refuses that write, because it has seen a
//! higher token.
//!
//! `cargo run -p examples --bin fencing`. With `DLOCK_URL=redis://localhost` the
//! holder is a process stopped by SIGSTOP, else a thread that sleeps with all its
//! renewals.

use std::io::{BufRead as _, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use dlock::{Access, Dlock, Fence, Token};
use rustix::process::{Pid, Signal, kill_process};

const KEY: &str = "account:7";
const TTL: Duration = Duration::from_millis(500);
/// Longer than the ttl: the lock is somebody else's by then.
const PAUSE: Duration = Duration::from_millis(1_500);

/// The resource: it keeps the highest token beside its data.
#[derive(Default)]
struct Account {
    balance: i64,
    fence: Fence,
}

impl Account {
    fn write(&mut self, who: &str, token: Token, balance: i64) -> bool {
        let passed = self.fence.pass(Access::Exclusive, token);
        if passed {
            self.balance = balance;
        }
        println!(
            "{who} writes {balance} with token {token}: {}",
            if passed { "done" } else { "REJECTED" }
        );
        passed
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    if std::env::args().nth(1).as_deref() == Some("holder") {
        return hold_until_paused().await;
    }
    let dlock = examples::connect().await?;
    let mut account = Account::default();
    let stale = if examples::is_embedded(&dlock) {
        let holder = paused_thread()?;
        successor(&dlock, &mut account).await?;
        holder.recv()?
    } else {
        let mut holder = PausedProcess::start()?;
        successor(&dlock, &mut account).await?;
        holder.wake_up()?
    };
    let token = Token::new(stale).context("a token")?;
    anyhow::ensure!(!account.write("the paused holder", token, 0), "a stale write went through");
    anyhow::ensure!(account.balance == 100, "the balance is wrong");
    println!("the balance is {}", account.balance);
    Ok(())
}

/// Whoever comes next: waits for the lock, which ends by its ttl, and writes.
async fn successor(dlock: &Dlock, account: &mut Account) -> Result<()> {
    let guard = dlock.mutex(KEY).lock().await?;
    anyhow::ensure!(account.write("the successor", guard.token(), 100), "the holder was refused");
    let _ = guard.release().await?;
    Ok(())
}

/// A process that holds the lock and is stopped.
struct PausedProcess {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl PausedProcess {
    fn start() -> Result<Self> {
        let mut process =
            Command::new(std::env::current_exe()?).arg("holder").stdout(Stdio::piped()).spawn()?;
        let output = process.stdout.take().context("its output")?;
        let mut holder = PausedProcess { process, lines: BufReader::new(output).lines() };
        holder.line()?; // it has the lock
        holder.signal(Signal::STOP)?;
        Ok(holder)
    }

    /// Lets it go on; answers the token with which it wants to write.
    fn wake_up(&mut self) -> Result<u64> {
        self.signal(Signal::CONT)?;
        let token = self.line()?.parse()?;
        self.process.wait()?;
        Ok(token)
    }

    fn line(&mut self) -> Result<String> {
        Ok(self.lines.next().context("the holder ended")??)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(i32::try_from(self.process.id())?).context("a process")?;
        Ok(kill_process(pid, signal)?)
    }
}

/// What that process does: it never looks at its guard, as careless code would.
async fn hold_until_paused() -> Result<()> {
    let dlock = examples::connect().await?;
    let guard = dlock.mutex(KEY).ttl(TTL).lock().await?;
    println!("held");
    tokio::time::sleep(TTL / 5).await;
    println!("{}", guard.token());
    Ok(())
}

/// A thread that holds the lock and sleeps, its renewals with it.
fn paused_thread() -> Result<mpsc::Receiver<u64>> {
    let (held, is_held) = mpsc::channel();
    let (wakes, woken) = mpsc::channel();
    std::thread::spawn(move || -> Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let guard = examples::connect().await?.mutex(KEY).ttl(TTL).lock().await?;
            held.send(())?;
            std::thread::sleep(PAUSE);
            wakes.send(guard.token().get())?;
            Ok(())
        })
    });
    is_held.recv()?;
    Ok(woken)
}
