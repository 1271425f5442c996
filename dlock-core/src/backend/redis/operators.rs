//! What operators ask: who has a key, which keys there are, and to break a lock.
//!
//! Each request is on one key: in a cluster whose slot is on the move, a request on
//! several keys of that slot is refused if one of them does not exist.

use redis::{Value, from_redis_value};

use super::scripts::{Code, Run};
use super::{Redis, codec, errors};
use crate::backend::{Break, BreakTarget, Cursor, KeyState, Page};
use crate::error::{Operation, Result};
use crate::key::Key;

/// How many names one `SCAN` looks at.
const SCANNED: usize = 1_000;
/// For how long it is remembered who broke a lock, in milliseconds.
const BREAKS_KEPT: u64 = 3_600_000;

impl Redis {
    pub(super) async fn inspect_key(&self, key: &Key) -> Result<KeyState> {
        let unreadable = |_| errors::unreadable(Operation::Inspect);
        let mut state = KeyState::default();
        for permits in [false, true] {
            let (name, run) = self.on(&self.route.scripts().inspect, key, permits);
            let (_, answer) = self.route.run(Operation::Inspect, &name, &run).await?;
            let (now, holders, waiters): (u64, Vec<String>, Vec<String>) =
                from_redis_value(answer).map_err(unreadable)?;
            state.holders.extend(codec::holder_states(now, &holders));
            state.waiters.extend(codec::waiter_states(now, &waiters));
        }
        let name = self.names.broken(key);
        let mut get = redis::cmd("GET");
        get.arg(&name);
        let broken = self.route.command(Operation::Inspect, &name, &get).await?;
        state.broken_by = from_redis_value(broken).map_err(unreadable)?;
        Ok(state)
    }

    pub(super) async fn break_key(&self, key: &Key, how: &Break) -> Result<usize> {
        let Break { by, target, delay } = how;
        let by = by.to_string();
        let code = &self.route.scripts().break_lock;
        let (name, mut run) = self.on(code, key, target.is_permits());
        run.arg(&by).arg(codec::micros(*delay));
        if let BreakTarget::Holder { token } = target {
            run.arg(token.to_string());
        }
        let (_, answer) = self.route.run(Operation::Break, &name, &run).await?;
        let broken: usize =
            from_redis_value(answer).map_err(|_| errors::unreadable(Operation::Break))?;
        if broken > 0 {
            let name = self.names.broken(key);
            let mut set = redis::cmd("SET");
            set.arg(&name).arg(&by).arg("PX").arg(BREAKS_KEPT);
            // It is for people only, and the lock is broken already.
            let _ = self.route.command(Operation::Break, &name, &set).await;
        }
        Ok(broken)
    }

    /// A run of a script on a key as a lock or as a semaphore, and its name.
    fn on(&self, code: &'static Code, key: &Key, permits: bool) -> (String, Run) {
        let name = self.names.state(key, permits);
        let mut run = code.on(1);
        run.arg(&name);
        (name, run)
    }

    /// Some of the keys. The servers are visited one after the other: a cursor is the
    /// name of a server, a space, and its own cursor.
    pub(super) async fn scan(&self, prefix: &str, cursor: Cursor) -> Result<Page> {
        let servers = self.route.servers(Operation::List).await?;
        let (at, from) = cursor.0.split_once(' ').unwrap_or(("", "0"));
        // A server that is gone in the meantime has its keys at another one, perhaps at
        // one that was visited before; then they are in the next listing.
        let place = servers.iter().position(|(name, _)| name.as_str() >= at);
        let Some(place) = place else { return Ok(Page::default()) };
        let (name, server) = &servers[place];
        let mut command = redis::cmd("SCAN");
        command.arg(if name == at { from } else { "0" });
        command.arg("MATCH").arg(self.names.pattern(prefix)).arg("COUNT").arg(SCANNED);
        let answer: Value = server.command(Operation::List, &command).await?;
        let (next, names): (String, Vec<Vec<u8>>) =
            from_redis_value(answer).map_err(|_| errors::unreadable(Operation::List))?;
        let keys =
            names.iter().filter_map(|name| self.names.key_of(std::str::from_utf8(name).ok()?));
        let next = match (&*next, servers.get(place + 1)) {
            ("0", None) => None,
            ("0", Some((name, _))) => Some(Cursor(format!("{name} 0"))),
            (next, _) => Some(Cursor(format!("{name} {next}"))),
        };
        Ok(Page { keys: keys.collect(), next })
    }
}
