//! `dlock ls`, `dlock show`, `dlock health`: who holds what.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::Result;
use clap::Args;
use dlock::backend::{Cursor, KeyState};
use dlock::{Dlock, Holder, Key, Mode};
use serde::Serialize;
use tokio::task::JoinSet;

use crate::output::{self, BOLD, DIM, GOOD, short, styled};
use crate::{Common, status};

/// How many keys are looked at together.
const AT_ONCE: usize = 32;

/// List the keys that are held or waited for
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dlock ls                     every key
  dlock ls order:              those that start with `order:`
  dlock ls --json | jq .key    for programs")]
pub(crate) struct Ls {
    /// Only keys that start so
    #[arg(default_value = "")]
    prefix: String,
}

/// Show who holds a key and who waits for it
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  dlock show order:7")]
pub(crate) struct Show {
    /// The key
    key: String,
}

/// Tell whether the backend answers, and how fast
#[derive(Debug, Args)]
#[command(after_help = "\
Ends with status 69 when it does not answer, so it serves as a probe:
  dlock health --url redis://localhost || echo down")]
pub(crate) struct Health {}

/// A key as `--json` prints it.
#[derive(Debug, Serialize)]
pub(crate) struct Seen {
    pub(crate) key: String,
    pub(crate) holders: Vec<HolderSeen>,
    pub(crate) waiters: Vec<WaiterSeen>,
    #[serde(skip_serializing_if = "Option::is_none")]
    broken_by: Option<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct HolderSeen {
    #[serde(flatten)]
    who: Who,
    token: Option<u64>,
    held_for_ms: u128,
    expires_in_ms: u128,
    #[serde(skip)]
    pub(crate) words: [String; 4],
}

#[derive(Debug, Serialize)]
pub(crate) struct WaiterSeen {
    #[serde(flatten)]
    who: Who,
    waiting_for_ms: u128,
    #[serde(skip)]
    pub(crate) words: [String; 2],
}

#[derive(Debug, Serialize)]
struct Who {
    name: String,
    host: String,
    pid: u32,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tags: Vec<(String, String)>,
    mode: String,
}

impl Who {
    fn new(holder: &Arc<Holder>, mode: Mode) -> Self {
        let Holder { name, host, pid, tags, .. } = &**holder;
        let (name, host) = (name.clone(), host.clone());
        Who { name, host, pid: *pid, tags: tags.clone(), mode: mode_words(mode) }
    }
}

fn mode_words(mode: Mode) -> String {
    match mode {
        Mode::Exclusive => "exclusive".into(),
        Mode::Shared => "shared".into(),
        Mode::Permits { count, of } => format!("{count} of {of}"),
        other => format!("{other:?}"),
    }
}

impl Seen {
    fn new(key: &Key, state: KeyState) -> Self {
        let holder = |it: dlock::backend::HolderState| HolderSeen {
            words: [
                format!("{} {}", mode_words(it.mode), it.holder),
                it.token.map_or("-".into(), |token| token.to_string()),
                short(it.held_for),
                short(it.expires_in),
            ],
            who: Who::new(&it.holder, it.mode),
            token: it.token,
            held_for_ms: it.held_for.as_millis(),
            expires_in_ms: it.expires_in.as_millis(),
        };
        let waiter = |it: dlock::backend::WaiterState| WaiterSeen {
            words: [format!("{} {}", mode_words(it.mode), it.holder), short(it.waiting_for)],
            who: Who::new(&it.holder, it.mode),
            waiting_for_ms: it.waiting_for.as_millis(),
        };
        Seen {
            key: key.as_str().to_owned(),
            holders: state.holders.into_iter().map(holder).collect(),
            waiters: state.waiters.into_iter().map(waiter).collect(),
            broken_by: state.broken_by,
        }
    }

    fn is_in_use(&self) -> bool {
        !self.holders.is_empty() || !self.waiters.is_empty()
    }
}

/// Every key in use that starts with `prefix`, in order.
pub(crate) async fn in_use(dlock: &Dlock, prefix: &str) -> Result<Vec<Seen>> {
    let mut keys = BTreeSet::new();
    let mut cursor = Some(Cursor::default());
    while let Some(place) = cursor {
        let page = dlock.list(prefix, place).await?;
        keys.extend(page.keys);
        cursor = page.next;
    }
    let mut left = keys.into_iter();
    let (mut looking, mut seen) = (JoinSet::new(), Vec::new());
    loop {
        for key in left.by_ref().take(AT_ONCE - looking.len()) {
            let dlock = dlock.clone();
            looking.spawn(async move {
                let state = dlock.inspect(&key).await?;
                Ok::<_, dlock::Error>(Seen::new(&key, state))
            });
        }
        let Some(looked) = looking.join_next().await else { break };
        seen.push(looked??);
    }
    seen.retain(Seen::is_in_use);
    seen.sort_unstable_by(|a, b| a.key.cmp(&b.key));
    Ok(seen)
}

/// Keys as a table.
pub(crate) fn overview(seen: &[Seen]) -> String {
    let numbers = ["TOKEN", "HELD FOR", "EXPIRES IN", "WAITING"];
    let heads = ["KEY", "HOLDER", "TOKEN", "HELD FOR", "EXPIRES IN", "WAITING"];
    let mut table = output::table(&heads, &numbers);
    for key in seen {
        let waiting = key.waiters.len().to_string();
        let none = [const { String::new() }; 4];
        let first = key.holders.first().map_or(&none, |holder| &holder.words);
        let [who, token, held_for, expires_in] = first;
        table.add_row([&key.key, who, token, held_for, expires_in, &waiting]);
        for holder in key.holders.iter().skip(1) {
            let [who, token, held_for, expires_in] = &holder.words;
            table.add_row(["", who, token, held_for, expires_in, ""]);
        }
    }
    table.to_string()
}

impl Ls {
    pub(crate) async fn run(self, common: &Common) -> Result<()> {
        let dlock = common.connect().await?;
        let seen = in_use(&dlock, &self.prefix).await?;
        if common.json {
            return seen.iter().try_for_each(output::print_json);
        }
        if seen.is_empty() {
            output::print(styled(DIM, "nothing is held or waited for"));
            return Ok(());
        }
        output::print(overview(&seen));
        Ok(())
    }
}

impl Show {
    pub(crate) async fn run(self, common: &Common) -> Result<()> {
        let key = Key::new(&self.key)?;
        let dlock = common.connect().await?;
        let seen = Seen::new(&key, dlock.inspect(&key).await?);
        if common.json {
            return output::print_json(&seen);
        }
        output::print(styled(BOLD, &seen.key));
        if seen.holders.is_empty() {
            output::print("  free");
        }
        for HolderSeen { words: [who, token, held_for, expires_in], .. } in &seen.holders {
            output::print(format!("  {} by {who}", styled(GOOD, "held")));
            output::print(format!(
                "    token {token}, for {held_for}, expires in {expires_in} unless renewed"
            ));
        }
        for (place, WaiterSeen { words: [who, waiting_for], .. }) in seen.waiters.iter().enumerate()
        {
            output::print(format!("  waiting, {} in line: {who}, for {waiting_for}", place + 1));
        }
        if let Some(by) = &seen.broken_by {
            output::print(format!("  last broken by {by}"));
        }
        Ok(())
    }
}

#[derive(Serialize)]
struct HealthSeen {
    backend: &'static str,
    ok: bool,
    round_trip_us: u128,
    problem: Option<String>,
}

impl Health {
    pub(crate) async fn run(self, common: &Common) -> Result<u8> {
        let dlock = Dlock::builder().config(common.config()?).connect_lazy()?;
        let first = dlock.health().await;
        // The first answer includes making the connection.
        let health = if first.is_ok() { dlock.health().await } else { first };
        let seen = HealthSeen {
            backend: health.backend,
            ok: health.is_ok(),
            round_trip_us: health.round_trip.as_micros(),
            problem: health.problem.as_ref().map(ToString::to_string),
        };
        if common.json {
            output::print_json(&seen)?;
        } else if let Some(problem) = &seen.problem {
            output::warn(problem);
        } else {
            let HealthSeen { backend, round_trip_us, .. } = seen;
            output::print(format!(
                "{backend}: {}, a round trip takes {round_trip_us} µs",
                styled(GOOD, "ok")
            ));
        }
        Ok(health.problem.map_or(0, |problem| status::of(&problem.into())))
    }
}
