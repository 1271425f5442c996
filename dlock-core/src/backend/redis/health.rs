//! The servers behind a URL: their roles, and what a failover would lose.

use std::sync::Arc;

use redis::{Value, cmd};

use super::Redis;
use super::connection::Link;
use crate::backend::{ServerRole, ServerState};
use crate::error::{Operation, Result};

impl Redis {
    /// All servers that are known, the primaries first.
    pub(super) async fn server_states(&self) -> Result<Vec<ServerState>> {
        let mut states = Vec::new();
        let mut replicas = Vec::new();
        for (_, link) in self.route.servers(Operation::Connect).await? {
            let info =
                text(link.command(Operation::Connect, cmd("INFO").arg("replication")).await?);
            let mut state = primary(link.peer().unwrap_or_else(|| link.shown().to_owned()), &info);
            if self.route.server().is_none() && requires_full_coverage(&link).await {
                let note = "`cluster-require-full-coverage` is yes: one lost slot stops all locks; set it to no";
                state.note =
                    Some(state.note.map_or(note.into(), |other| format!("{other}; {note}")));
            }
            states.push(state);
            replicas.extend(replicas_in(&info));
        }
        let uncovered = self.route.uncovered();
        if let (Some(first), 1..) = (states.first_mut(), uncovered) {
            first.note = Some(format!(
                "{uncovered} slots are served by no node; see `redis-cli --cluster check`"
            ));
        }
        states.extend(replicas);
        if let Some(link) = self.route.server() {
            states.extend(link.sentinel_states().await);
        }
        Ok(states)
    }
}

async fn requires_full_coverage(link: &Arc<Link>) -> bool {
    let mut get = cmd("CONFIG");
    get.arg("GET").arg("cluster-require-full-coverage");
    match link.command(Operation::Connect, &get).await {
        Ok(answer) => redis::from_redis_value::<Vec<String>>(answer)
            .is_ok_and(|pair| pair.get(1).is_some_and(|value| value == "yes")),
        Err(_) => false, // without the right to ask nobody knows
    }
}

fn text(answer: Value) -> String {
    match answer {
        Value::BulkString(text) => String::from_utf8_lossy(&text).into_owned(),
        Value::VerbatimString { text, .. } => text,
        _ => String::new(),
    }
}

fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.trim_end().strip_prefix(name)?.strip_prefix(':'))
}

fn primary(address: String, info: &str) -> ServerState {
    ServerState {
        address,
        role: ServerRole::Primary,
        behind: None,
        note: {
            (field(info, "connected_slaves") == Some("0")).then(|| {
                "it has no replica: without persistence a crash loses every lock".to_owned()
            })
        },
    }
}

/// The replicas in what a primary says of its replication.
fn replicas_in(info: &str) -> Vec<ServerState> {
    let offset: Option<u64> = field(info, "master_repl_offset").and_then(|it| it.parse().ok());
    let lines = info.lines().filter(|line| line.starts_with("slave") && line.contains("ip="));
    lines
        .filter_map(|line| {
            let (_, fields) = line.trim_end().split_once(':')?;
            let get = |name: &str| {
                let found = fields.split(',').find_map(|it| it.strip_prefix(name));
                found.and_then(|it| it.strip_prefix('='))
            };
            let has: Option<u64> = get("offset").and_then(|it| it.parse().ok());
            let is_online = get("state") == Some("online");
            Some(ServerState {
                address: format!("{}:{}", get("ip")?, get("port")?),
                role: ServerRole::Replica,
                behind: offset.zip(has).map(|(all, has)| all.saturating_sub(has)),
                note: (!is_online).then(|| "it is not synchronized".to_owned()),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replication_is_read() {
        let info = "# Replication\r\nrole:master\r\nconnected_slaves:2\r\n\
            slave0:ip=10.0.0.2,port=6379,state=online,offset=90,lag=0\r\n\
            slave1:ip=10.0.0.3,port=6380,state=wait_bgsave,offset=0,lag=0\r\n\
            master_repl_offset:100\r\n";
        let state = primary("h:1".into(), info);
        assert_eq!((state.role, state.note), (ServerRole::Primary, None));
        let replicas = replicas_in(info);
        assert_eq!(replicas[0].address, "10.0.0.2:6379");
        assert_eq!((replicas[0].behind, replicas[0].note.clone()), (Some(10), None));
        assert_eq!(replicas[1].behind, Some(100));
        assert!(replicas[1].note.is_some());
        let alone = primary("h:1".into(), "connected_slaves:0\r\n");
        assert!(alone.note.is_some_and(|note| note.contains("no replica")));
    }
}
