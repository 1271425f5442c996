//! The processor time that client and server use while a load is measured.

use dlock::Config;
use redis::aio::MultiplexedConnection;

use crate::{clock, server};

/// The share of one core that this process uses from one moment to the other, by
/// [`clock::now`]. All threads count; with several busy threads it is above 1.
pub async fn client_share(from: u64, until: u64) -> f64 {
    clock::sleep_until(from).await;
    let (began, before) = (clock::now(), clock::cpu_time());
    clock::sleep_until(until).await;
    let used = clock::cpu_time().saturating_sub(before);
    share(used.as_secs_f64(), (clock::now() - began) as f64 / 1e9)
}

/// The share of one core that the server uses from one moment to the other; `None` if
/// there is no server, if there are several, or if it does not tell.
pub async fn server_share(config: &Config, from: u64, until: u64) -> Option<f64> {
    if server::is_embedded(config) || server::is_cluster(config) {
        return None;
    }
    let mut connection = server::connect(config).await.ok()?;
    clock::sleep_until(from).await;
    let (began, before) = server_cpu(&mut connection).await?;
    clock::sleep_until(until).await;
    let (ended, after) = server_cpu(&mut connection).await?;
    Some(share(after - before, ended - began))
}

/// What each server has used so far: its configuration, its time and its processor time.
pub type UsageNow = Vec<(Config, Option<(f64, f64)>)>;

/// What each of these servers has used so far.
pub async fn usage_now(servers: &[Config]) -> UsageNow {
    let mut used = Vec::new();
    for server in servers {
        used.push((server.clone(), used_by(server).await));
    }
    used
}

/// The share of one core that each server used since then; `None` if it does not tell.
pub async fn shares_since(before: &UsageNow) -> Vec<Option<f64>> {
    let mut shares = Vec::new();
    for (server, before) in before {
        let after = used_by(server).await;
        let both = before.zip(after);
        shares.push(both.map(|((began, from), (ended, to))| share(to - from, ended - began)));
    }
    shares
}

async fn used_by(server: &Config) -> Option<(f64, f64)> {
    server_cpu(&mut server::connect(server).await.ok()?).await
}

/// The time by the server's clock and its processor time, in seconds. A server under
/// load answers late, so the time of the answer would not do.
async fn server_cpu(connection: &mut MultiplexedConnection) -> Option<(f64, f64)> {
    let mut both = redis::pipe();
    both.cmd("TIME").cmd("INFO").arg("cpu");
    let ((seconds, micros), info): ((u64, u64), String) =
        both.query_async(connection).await.ok()?;
    let number = |name: &str| -> Option<f64> {
        let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().parse().ok()
    };
    let used = number("used_cpu_sys")? + number("used_cpu_user")?;
    Some((seconds as f64 + micros as f64 / 1e6, used))
}

/// A share with four decimal digits.
fn share(used: f64, elapsed: f64) -> f64 {
    if elapsed <= 0.0 {
        return 0.0;
    }
    (used / elapsed * 10_000.0).round() / 10_000.0
}
