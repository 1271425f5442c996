//! Why a lock has a fencing token.
//!
//! A holder is paused, its lock expires and goes to the next holder. Then the first one
//! wakes up and writes. The account rejects that write, because it has already seen a
//! higher token.
//!
//! Run it with `cargo run -p examples --bin fencing`. With `DLOCK_URL=redis://localhost`
//! the holder is a process that is stopped by SIGSTOP. Otherwise it is a thread that
//! sleeps, so that its lock is not renewed.

use std::io::{BufRead as _, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use dlock::{Access, Dlock, Fence, Token};
use rustix::process::{Pid, Signal, kill_process};

const KEY: &str = "account:7";
const TTL: Duration = Duration::from_millis(500);
/// Longer than the ttl, so that the lock expires during the pause.
const PAUSE: Duration = Duration::from_millis(1_500);

/// The protected resource. It stores the highest token together with its data.
#[derive(Default)]
struct Account {
    balance: i64,
    fence: Fence,
}

impl Account {
    /// Writes the balance; returns false if the token is too old.
    fn write(&mut self, who: &str, token: Token, balance: i64) -> bool {
        let accepted = self.fence.pass(Access::Exclusive, token);
        if accepted {
            self.balance = balance;
        }
        println!(
            "{who} writes {balance} with token {token}: {}",
            if accepted { "done" } else { "REJECTED" }
        );
        accepted
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
    let token = Token::new(stale).context("the token is 0")?;
    anyhow::ensure!(!account.write("the paused holder", token, 0), "a stale write was accepted");
    anyhow::ensure!(account.balance == 100, "the balance is wrong");
    println!("the balance is {}", account.balance);
    Ok(())
}

/// The next holder: waits until the lock has expired, and writes.
async fn successor(dlock: &Dlock, account: &mut Account) -> Result<()> {
    let guard = dlock.mutex(KEY).lock().await?;
    anyhow::ensure!(
        account.write("the successor", guard.token(), 100),
        "the write of the current holder was rejected"
    );
    let _ = guard.release().await?;
    Ok(())
}

/// A process that holds the lock and is stopped by SIGSTOP.
struct PausedProcess {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl PausedProcess {
    fn start() -> Result<Self> {
        let mut process =
            Command::new(std::env::current_exe()?).arg("holder").stdout(Stdio::piped()).spawn()?;
        let output = process.stdout.take().context("the holder has no output")?;
        let mut holder = PausedProcess { process, lines: BufReader::new(output).lines() };
        holder.line()?; // printed once it holds the lock
        holder.signal(Signal::STOP)?;
        Ok(holder)
    }

    /// Continues the process and returns the token that it wants to write with.
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
        let pid =
            Pid::from_raw(i32::try_from(self.process.id())?).context("the process id is 0")?;
        Ok(kill_process(pid, signal)?)
    }
}

/// Runs in that process. Like careless code, it never checks its guard.
async fn hold_until_paused() -> Result<()> {
    let dlock = examples::connect().await?;
    let guard = dlock.mutex(KEY).ttl(TTL).lock().await?;
    println!("held");
    tokio::time::sleep(TTL / 5).await;
    println!("{}", guard.token());
    Ok(())
}

/// A thread that holds the lock and sleeps. Its runtime sleeps too, so the lock is not
/// renewed.
fn paused_thread() -> Result<mpsc::Receiver<u64>> {
    let (held_sender, held) = mpsc::channel();
    let (token_sender, token) = mpsc::channel();
    std::thread::spawn(move || -> Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let guard = examples::connect().await?.mutex(KEY).ttl(TTL).lock().await?;
            held_sender.send(())?;
            std::thread::sleep(PAUSE);
            token_sender.send(guard.token().get())?;
            Ok(())
        })
    });
    held.recv()?;
    Ok(token)
}
