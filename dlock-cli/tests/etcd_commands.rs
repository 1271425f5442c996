//! The commands on a real etcd, and beside `etcdctl lock`.

mod support;

use std::process::{Command, Stdio};

use dlock::{Dlock, State};
use dlock_testkit::etcd::{EtcdCluster, EtcdServer};
use support::{dlock, json, on, output, printed, status, stderr_of, until};

#[tokio::test(flavor = "multi_thread")]
async fn operators_see_and_break_locks() {
    let Some(server) = EtcdServer::start() else { return };
    let shop = Dlock::builder().url(&server.url()).client_name("shop-7").connect().await;
    let shop = shop.expect("a client");
    let guard = shop.mutex("order/7").tag("job", "pay").lock().await.expect("the lock");
    let _permits = shop.semaphore("exports", 10).permits(3).lock().await.expect("permits");
    let seen = json(&output(&mut on(&server.url()), &["ls", "--json"]));
    assert_eq!(seen.len(), 2, "{seen:?}");
    assert_eq!(seen[0]["key"], "exports");
    assert_eq!(seen[0]["holders"][0]["mode"], "3 of 10");
    assert_eq!(seen[1]["key"], "order/7");
    assert_eq!(seen[1]["holders"][0]["tags"][0][1], "pay");
    let shown = printed(&output(&mut on(&server.url()), &["show", "order/7"]));
    assert!(shown.contains("held by exclusive shop-7"), "{shown}");
    let watch = ["watch", "--json", "--count", "1", "--every", "50ms"];
    let watched = json(&output(&mut on(&server.url()), &watch));
    assert_eq!(watched[0]["keys"].as_array().map(Vec::len), Some(2));
    assert_eq!(guard.state(), State::Held);
    let broken = json(&output(&mut on(&server.url()), &["break", "order/7", "--yes", "--json"]));
    assert_eq!(broken[0]["holders"], 1);
    let reason = guard.lost().await.to_string();
    assert!(reason.contains("broken by"), "{reason}");
    drop(shop.mutex("order/7").lock().await.expect("free after a while"));
}

#[test]
fn a_program_runs_under_a_lock() {
    let Some(server) = EtcdServer::start() else { return };
    let script = ["run", "a/b", "--", "sh", "-c", "echo $DLOCK_KEY $DLOCK_TOKEN; exit 7"];
    let told = output(&mut on(&server.url()), &script);
    assert_eq!(status(&told), 7, "{}", stderr_of(&told));
    let token = printed(&told).trim().strip_prefix("a/b ").map(str::parse::<u64>);
    assert!(matches!(token, Some(Ok(1..))), "{token:?}");
    until("no lease is left", || server.leases().is_empty());
}

#[test]
fn health_is_a_probe_and_shows_the_members() {
    let Some(mut cluster) = EtcdCluster::start() else { return };
    let well = output(&mut on(&cluster.url()), &["health", "--json"]);
    assert_eq!(status(&well), 0, "{}", stderr_of(&well));
    let view = json(&well);
    let servers = view[0]["servers"].as_array().into_iter().flatten();
    let mut roles: Vec<_> = servers.filter_map(|it| it["role"].as_str()).collect();
    roles.sort_unstable();
    assert_eq!(roles, ["primary", "replica", "replica"], "{view:?}");
    cluster.servers.iter_mut().for_each(EtcdServer::kill);
    let down = output(&mut on(&cluster.url()), &["health", "--json"]);
    assert_eq!((status(&down), json(&down)[0]["ok"].as_bool()), (69, Some(false)));
}

#[test]
fn locks_are_measured() {
    let Some(cluster) = EtcdCluster::start() else { return };
    let arguments = ["bench", "lock", "--duration", "500ms", "--tasks", "8", "--json"];
    let measured = output(&mut on(&cluster.url()), &arguments);
    assert_eq!(status(&measured), 0, "{}", stderr_of(&measured));
}

/// Stock is not kept in etcd, and the command says so.
#[test]
fn stock_is_refused() {
    let Some(server) = EtcdServer::start() else { return };
    let refused = output(&mut on(&server.url()), &["inventory", "phone"]);
    assert_ne!(status(&refused), 0);
    assert!(!stderr_of(&refused).contains("panicked"), "{}", stderr_of(&refused));
}

/// `dlock run NAME` and `etcdctl lock NAME` exclude each other, whoever is first.
#[test]
fn run_and_etcdctl_lock_exclude_each_other() {
    let Some(server) = EtcdServer::start() else { return };
    let Some(etcdctl) = dlock_testkit::interop::etcdctl() else { return };
    let endpoint = format!("--endpoints=127.0.0.1:{}", server.port());
    let file = tempfile::NamedTempFile::new().expect("a file");
    let path = file.path().to_str().expect("a path").to_owned();
    // Appends a line at begin and end: with exclusion the two are never apart.
    let script = format!("echo in >> {path}; sleep 0.05; echo out >> {path}");
    let mut running = Vec::new();
    for _ in 0..4 {
        let etcdctl = Command::new(&etcdctl)
            .args([&endpoint, "lock", "nightly/job", "--", "sh", "-c", &script])
            .stdout(Stdio::null())
            .spawn();
        running.push(etcdctl.expect("etcdctl can be run"));
        let mut ours = dlock();
        ours.env("DLOCK_URL", server.url());
        let ours = ours.args(["run", "nightly/job", "--", "sh", "-c", &script]).spawn();
        running.push(ours.expect("dlock can be run"));
    }
    for mut program in running {
        assert!(program.wait().expect("it ends").success());
    }
    let lines = std::fs::read_to_string(file.path()).expect("the file");
    assert_eq!(lines, "in\nout\n".repeat(8));
}
