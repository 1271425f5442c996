//! The commands for operators (`ls`, `show`, `break`, `watch`, `health` and so on) on a real
//! Redis.

mod support;

use std::io::{Read as _, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use dlock::{Dlock, State};
use dlock_segment::{CreationId, Deduction, Inventory, Reservation};
use dlock_testkit::redis::RedisServer;
use dlock_testkit::topology::{SentinelServers, independent};
use support::{PROGRAM, dlock, json, on, output, printed, status, stderr_of};

async fn client(server: &RedisServer) -> Dlock {
    let client = Dlock::builder().url(&server.url()).client_name("shop-7");
    client.connect().await.expect("a client")
}

/// Somebody who can write to the store sends the terminal of an operator no commands.
#[tokio::test(flavor = "multi_thread")]
async fn control_characters_of_the_store_are_not_printed() {
    let Some(server) = RedisServer::start() else { return };
    let shop = client(&server).await;
    let _guard = shop.mutex("order:7").tag("job", "EVIL").lock().await.expect("the lock");
    let record = server.cli(&["--raw", "GET", "dlock:2:{default:order:7}:l"]);
    assert!(record.contains("EVIL"), "{record}");
    let evil = record.trim_end().replace("EVIL", "\\u001b]52;c;ZXZpbA\\u0007");
    server.cli(&["SET", "dlock:2:{default:order:7}:l", &evil, "KEEPTTL"]);
    for command in [&["show", "order:7"][..], &["ls"], &["watch", "--count", "1"]] {
        let shown = printed(&output(&mut on(&server.url()), command));
        assert!(shown.contains("]52;c;ZXZpbA"), "{shown}");
        assert!(!shown.contains('\u{1b}') && !shown.contains('\u{7}'), "{shown:?}");
    }
}

/// A key that somebody else has written does not hide the locks.
#[tokio::test(flavor = "multi_thread")]
async fn a_malformed_key_does_not_hide_the_others() {
    let Some(server) = RedisServer::start() else { return };
    let shop = client(&server).await;
    let _guard = shop.mutex("shop:a").lock().await.expect("the lock");
    server.cli(&["LPUSH", "dlock:2:{default:shop:zzz}:l", "x"]);
    for command in [&["ls"][..], &["watch", "--count", "1"]] {
        let seen = output(&mut on(&server.url()), &[command, &["--json"]].concat());
        assert_eq!(status(&seen), 0, "{}", stderr_of(&seen));
        assert!(printed(&seen).contains("shop-7"), "{}", printed(&seen));
        assert!(printed(&seen).contains("problem"), "{}", printed(&seen));
    }
    let table = printed(&output(&mut on(&server.url()), &["ls", "shop:"]));
    assert!(table.contains("shop:zzz") && table.contains("shop-7"), "{table}");
}

#[tokio::test(flavor = "multi_thread")]
async fn holders_and_waiters_are_listed() {
    let Some(server) = RedisServer::start() else { return };
    let shop = client(&server).await;
    let guard = shop.mutex("order:7").tag("job", "pay").lock().await.expect("the lock");
    let _permits = shop.semaphore("exports", 10).permits(3).lock().await.expect("permits");
    let other = client(&server).await;
    let waiting = tokio::spawn(async move { other.mutex("order:7").wait_unlimited().lock().await });
    while shop.inspect("order:7").await.expect("a look").waiters.is_empty() {
        tokio::task::yield_now().await;
    }

    let seen = json(&output(&mut on(&server.url()), &["ls", "--json"]));
    assert_eq!(seen.len(), 2);
    assert_eq!(seen[0]["key"], "exports");
    assert_eq!(seen[0]["store"], server.url());
    assert_eq!(seen[0]["namespace"], "default");
    assert_eq!(seen[0]["holders"][0]["mode"], "3 of 10");
    assert_eq!(seen[0]["holders"][0]["token"], serde_json::Value::Null);
    assert_eq!(seen[1]["key"], "order:7");
    assert_eq!(seen[1]["holders"][0]["name"], "shop-7");
    assert_eq!(seen[1]["holders"][0]["tags"][0][1], "pay");
    assert_eq!(seen[1]["holders"][0]["pid"], std::process::id());
    assert_eq!(seen[1]["waiters"][0]["mode"], "exclusive");

    let table = printed(&output(&mut on(&server.url()), &["ls", "order:"]));
    assert!(table.contains("order:7") && table.contains("shop-7"), "{table}");
    assert!(!table.contains("exports") && !table.contains('\x1b'), "{table}");

    let shown = printed(&output(&mut on(&server.url()), &["show", "order:7"]));
    assert!(shown.contains("held by exclusive shop-7") && shown.contains("1 in line"), "{shown}");
    let token = guard.token().to_string();
    let shown = json(&output(&mut on(&server.url()), &["show", "order:7", "--json"]));
    assert!(
        shown[0]["holders"][0]["token"].as_u64().is_some_and(|first| first <= guard.token().get()),
        "{token}"
    );
    let free = printed(&output(&mut on(&server.url()), &["show", "nobody's"]));
    assert!(free.contains("free") && free.contains(&server.url()), "{free}");
    let mistyped = output(&mut on(&server.url()), &["ls", "--namespace", "shp"]);
    assert!(printed(&mistyped).contains("namespace `shp`"), "{}", printed(&mistyped));

    let watched = json(&output(
        &mut on(&server.url()),
        &["watch", "--json", "--count", "2", "--every", "50ms"],
    ));
    assert_eq!(watched.len(), 2);
    assert_eq!(watched[1]["keys"].as_array().map(Vec::len), Some(2));
    waiting.abort();
}

async fn eventually_free(client: &Dlock, key: &str) {
    drop(client.mutex(key).lock().await.expect("free after a while"));
    while !client.inspect(key).await.expect("an inspection").holders.is_empty() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn breaking_asks_first() {
    let Some(server) = RedisServer::start() else { return };
    let shop = client(&server).await;
    let guard = shop.mutex("order:7").lock().await.expect("the lock");
    let unsure =
        output(on(&server.url()).stdin(std::process::Stdio::null()), &["break", "order:7"]);
    assert_eq!(status(&unsure), 1);
    assert!(stderr_of(&unsure).contains("--yes"), "{}", stderr_of(&unsure));
    assert_eq!(guard.state(), State::Held);
    let broken = json(&output(&mut on(&server.url()), &["break", "order:7", "--yes", "--json"]));
    assert_eq!(broken[0]["holders"], 1);
    let reason = guard.lost().await.to_string();
    assert!(reason.contains("broken by"), "{reason}");
    // It stays taken for `break_delay`, so that its holder hears of it first.
    eventually_free(&shop, "order:7").await;
    for again in [&["break", "order:7", "-y"][..], &["break", "order:7"]] {
        let again = output(on(&server.url()).stdin(std::process::Stdio::null()), again);
        assert_eq!(status(&again), 0, "there is nothing to ask about");
        assert!(printed(&again).contains("nobody holds"), "{}", printed(&again));
    }
}

/// The lock changes hands while `dlock break` waits for the answer of the operator.
#[tokio::test(flavor = "multi_thread")]
async fn only_the_holder_that_was_shown_is_broken() {
    let Some(server) = RedisServer::start() else { return };
    let shop = client(&server).await;
    let sick = shop.mutex("order:7").lock().await.expect("the lock");
    let mut asked = AskedOnTerminal::start(&server.url(), "break order:7");
    let shown = asked.question();
    assert!(shown.contains(&format!("token {}", sick.token())), "{shown}");
    let seen = sick.token().to_string();
    let _ = sick.release().await.expect("an answer");
    let healthy = shop.mutex("order:7").lock().await.expect("the lock");
    let (code, printed_later) = asked.answer("y");
    assert_eq!(code, Some(75), "{printed_later}");
    assert!(printed_later.contains("has changed hands"), "{printed_later}");
    assert!(printed_later.contains("nothing was broken"), "{printed_later}");
    let scripted = output(&mut on(&server.url()), &["break", "order:7", "--token", &seen]);
    assert_eq!(status(&scripted), 75, "{}", stderr_of(&scripted));
    assert!(stderr_of(&scripted).contains("nothing was broken"), "{}", stderr_of(&scripted));
    assert!(tokio::time::timeout(Duration::from_millis(300), healthy.lost()).await.is_err());
    assert_eq!(healthy.state(), State::Held);

    let mut asked = AskedOnTerminal::start(&server.url(), "break order:7");
    asked.question();
    assert_eq!(asked.answer("n").0, Some(1));
    assert_eq!(healthy.state(), State::Held);
    let mut asked = AskedOnTerminal::start(&server.url(), "break order:7");
    asked.question();
    assert_eq!(asked.answer("y").0, Some(0));
    healthy.lost().await;
    eventually_free(&shop, "order:7").await;

    let guard = shop.mutex("order:7").lock().await.expect("the lock");
    let token = guard.token().to_string();
    let scripted = output(&mut on(&server.url()), &["break", "order:7", "--token", &token]);
    assert_eq!(status(&scripted), 0, "{}", stderr_of(&scripted));
    guard.lost().await;
}

/// A key that stays taken after its release does not look like that of a dead process.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_is_kept_is_shown_as_kept() {
    let Some(server) = RedisServer::start() else { return };
    let shop = client(&server).await;
    let lock = shop.mutex("nightly").hold_at_least(Duration::from_secs(3_600));
    let _ = lock.lock().await.expect("the lock").release().await.expect("an answer");
    let listed = printed(&output(&mut on(&server.url()), &["ls"]));
    assert!(listed.contains("kept, "), "{listed}");
    let shown = printed(&output(&mut on(&server.url()), &["show", "nightly"]));
    assert!(shown.contains("the holder is done") && !shown.contains("renewed"), "{shown}");
    let seen = json(&output(&mut on(&server.url()), &["show", "nightly", "--json"]));
    assert_eq!(seen[0]["holders"][0]["is_over"], true, "{seen:?}");
}

/// The lock and the semaphore of a key are broken apart.
#[tokio::test(flavor = "multi_thread")]
async fn permits_are_not_taken_with_the_lock() {
    let Some(server) = RedisServer::start() else { return };
    let shop = client(&server).await;
    let permits = shop.semaphore("exports", 3).permits(2).lock().await.expect("permits");
    let guard = shop.mutex("exports").lock().await.expect("the lock");
    let mut asked = AskedOnTerminal::start(&server.url(), "break exports");
    let shown = asked.question();
    assert!(shown.contains("--permits"), "{shown}");
    assert_eq!(asked.answer("y").0, Some(0));
    guard.lost().await;
    assert_eq!(permits.state(), State::Held);
    let guard = shop.mutex("exports").lock().await.expect("free after a while");
    let broken = output(&mut on(&server.url()), &["break", "exports", "--permits", "--yes"]);
    assert_eq!(status(&broken), 0, "{}", stderr_of(&broken));
    permits.lost().await;
    assert_eq!(guard.state(), State::Held);
    drop(guard);
    eventually_free(&shop, "exports").await;
    let permits = shop.semaphore("exports", 3).permits(2).lock().await.expect("permits");
    let broken = json(&output(&mut on(&server.url()), &["break", "exports", "--yes", "--json"]));
    assert_eq!(broken[0]["holders"], 1, "nobody holds the lock, so the permits are meant");
    permits.lost().await;
}

/// A command of dlock on a terminal, which asks a question.
struct AskedOnTerminal {
    child: Child,
    printed: String,
}

impl AskedOnTerminal {
    fn start(url: &str, arguments: &str) -> Self {
        let mut command = Command::new("script");
        command.args(["-qec", &format!("{PROGRAM} {arguments}"), "/dev/null"]);
        command.env("DLOCK_URL", url).env_remove("DLOCK_NAMESPACE");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let child = command.spawn().expect("script of util-linux, which makes a terminal");
        AskedOnTerminal { child, printed: String::new() }
    }

    /// What it has printed when it asks.
    fn question(&mut self) -> String {
        let output = self.child.stdout.as_mut().expect("its output");
        let mut some = [0; 1_024];
        while !self.printed.contains("[y/N]") {
            let read = output.read(&mut some).expect("its output");
            assert!(read > 0, "it ended without a question: {}", self.printed);
            self.printed.push_str(&String::from_utf8_lossy(&some[..read]));
        }
        std::mem::take(&mut self.printed)
    }

    /// Answers it. Returns its exit status, and what it printed then.
    fn answer(mut self, answer: &str) -> (Option<i32>, String) {
        let mut input = self.child.stdin.take().expect("its input");
        writeln!(input, "{answer}").expect("it reads");
        let mut output = self.child.stdout.take().expect("its output");
        output.read_to_string(&mut self.printed).expect("its output");
        drop(input);
        (self.child.wait().expect("it ends").code(), self.printed)
    }
}

#[test]
fn health_is_a_probe() {
    let Some(mut server) = RedisServer::start() else { return };
    let well = output(&mut on(&server.url()), &["health", "--json"]);
    assert_eq!((status(&well), json(&well)[0]["ok"].as_bool()), (0, Some(true)));
    server.kill();
    let down = output(&mut on(&server.url()), &["health", "--json"]);
    assert_eq!((status(&down), json(&down)[0]["ok"].as_bool()), (69, Some(false)));
    let down = output(&mut on(&server.url()), &["health"]);
    assert_eq!((status(&down), stderr_of(&down).lines().count()), (69, 1), "{}", stderr_of(&down));
}

#[test]
fn health_shows_the_topology() {
    let Some(topology) = SentinelServers::with(2, 1) else { return };
    let well = output(&mut on(&topology.url()), &["health", "--json"]);
    assert_eq!(status(&well), 0, "{}", stderr_of(&well));
    let view = json(&well);
    let servers = view[0]["servers"].as_array().into_iter().flatten();
    let roles: Vec<_> = servers.filter_map(|it| it["role"].as_str()).collect();
    assert_eq!(roles, ["primary", "replica", "sentinel"]);
    let well = output(&mut on(&topology.url()), &["health"]);
    assert!(printed(&well).contains("bytes at most"), "{}", printed(&well));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inventory_is_shown_and_audited() {
    let Some(server) = RedisServer::start() else { return };
    let shop = client(&server).await;
    let sale = Inventory::builder(&shop, "phone").stock(100).segments(4).create().await;
    let sale = sale.expect("a sale");
    let sold = sale.deduct(30).operation("a").send().await;
    assert!(matches!(sold, Ok(Deduction::Taken(_))), "{sold:?}");
    let reserved = sale.reserve(10).operation("b").send().await;
    assert!(matches!(reserved, Ok(Reservation::Held(_))), "{reserved:?}");
    let seen = json(&output(&mut on(&server.url()), &["inventory", "phone", "audit", "--json"]));
    let counts = (&seen[0]["available"], &seen[0]["reserved"], &seen[0]["sold"]);
    assert_eq!(counts, (&60.into(), &10.into(), &30.into()), "{seen:?}");
    assert_eq!(
        (&seen[0]["clean"], seen[0]["segments"].as_array().map(Vec::len)),
        (&true.into(), Some(4))
    );
    let shown = printed(&output(&mut on(&server.url()), &["inventory", "phone", "audit"]));
    assert!(shown.contains('█') && shown.contains("every unit is accounted for"), "{shown}");
    let shown = printed(&output(&mut on(&server.url()), &["inventory", "phone"]));
    assert!(
        shown.contains('█') && shown.contains("selling") && !shown.contains("audit"),
        "{shown}"
    );
    let seen = json(&output(&mut on(&server.url()), &["inventory", "phone", "--json"]));
    assert_eq!(
        (&seen[0]["sold"], seen[0]["by_segment"].as_array().map(Vec::len)),
        (&30.into(), Some(4))
    );
    assert_eq!(seen[0]["creation_id"].to_string(), sale.creation_id().to_string());
    let missing = output(&mut on(&server.url()), &["stock", "nothing"]);
    assert_eq!(status(&missing), 1);
    assert!(
        stderr_of(&missing).contains("there is no inventory `nothing`"),
        "{}",
        stderr_of(&missing)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inventory_is_created_once_and_opened_by_its_id() {
    let Some(server) = RedisServer::start() else { return };
    let create = |stock: &str| {
        let terms = ["phone", "create", "--stock", stock, "--segments", "4", "--per-buyer", "2"];
        output(&mut on(&server.url()), &[&["stock"], &terms[..]].concat())
    };
    let made = create("10");
    assert_eq!(status(&made), 0, "{}", stderr_of(&made));
    let id: CreationId = printed(&made).trim().parse().expect("the creation id alone");
    assert_eq!(printed(&create("10")), printed(&made), "once");
    let other = create("11");
    assert_eq!(status(&other), 1);
    assert!(stderr_of(&other).contains("stock is 10, not 11"), "{}", stderr_of(&other));
    let shop = client(&server).await;
    let sale = Inventory::open_created(&shop, "phone", id).await.expect("the sale");
    assert_eq!(sale.stock().await.expect("counts").available, 10);
    server.cli(&["FLUSHALL"]);
    let lost = Inventory::open_created(&shop, "phone", id).await;
    assert!(matches!(lost, Err(dlock_segment::Error::Lost(_))), "{lost:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn units_come_back_after_the_retention_and_are_written_off() {
    let Some(server) = RedisServer::start() else { return };
    let shop = client(&server).await;
    let sale = Inventory::builder(&shop, "phone").stock(10).per_buyer(4);
    let sale = sale.retention(std::time::Duration::from_millis(20)).create().await.expect("a sale");
    let bought = sale.deduct(4).operation("order").buyer("u").send().await;
    let Ok(Deduction::Taken(receipt)) = bought else { panic!("{bought:?}") };
    let file = std::env::temp_dir().join(format!("dlock-receipt-{}.json", std::process::id()));
    std::fs::write(&file, serde_json::to_string(&receipt).expect("JSON")).expect("a file");
    let path = file.clone();
    let file = file.to_str().expect("a path");
    while sale.audit().await.expect("an audit").operations > 0 {
        tokio::task::yield_now().await;
    }
    let inventory = |arguments: &[&str]| {
        output(&mut on(&server.url()), &[&["inventory", "phone"], arguments].concat())
    };
    let gone = inventory(&["refund", "order"]);
    assert_eq!(status(&gone), 1);
    assert!(stderr_of(&gone).contains("receipt"), "{}", stderr_of(&gone));
    for _ in 0..2 {
        let back =
            inventory(&["refund", "order", "--receipt", file, "--quantity", "1", "--id", "r"]);
        assert_eq!(
            (status(&back), printed(&back).trim()),
            (0, "gave back 1"),
            "{}",
            stderr_of(&back)
        );
    }
    let back = inventory(&["refund", "order", "--receipt", file, "--damaged"]);
    assert_eq!(printed(&back).trim(), "gave back as damaged 3", "{}", stderr_of(&back));
    let more = inventory(&["refund", "order", "--receipt", file, "--id", "more"]);
    assert_eq!(status(&more), 1);
    assert!(stderr_of(&more).contains("has 0 left"), "{}", stderr_of(&more));
    std::fs::remove_file(path).expect("the file is there");
    let off = inventory(&["write-off", "2", "--id", "damage"]);
    assert_eq!(printed(&off).trim(), "wrote off 2", "{}", stderr_of(&off));
    let off = inventory(&["write-off", "20", "--id", "more"]);
    assert!(status(&off) == 1 && stderr_of(&off).contains("5 available"), "{}", stderr_of(&off));
    let kept = inventory(&["retention", "3600", "--json"]);
    assert_eq!(json(&kept)[0]["retention"], 3_600_000, "{}", stderr_of(&kept));
    let shown = printed(&inventory(&["audit"]));
    assert!(shown.contains("5 available") && shown.contains("5 written off"), "{shown}");
    assert!(shown.contains("every unit is accounted for"), "{shown}");
}

/// A sale is stopped, changed, looked into and removed without a program.
#[tokio::test(flavor = "multi_thread")]
async fn a_sale_is_run_by_the_command() {
    let Some(server) = RedisServer::start() else { return };
    let inventory = |arguments: &[&str]| {
        output(&mut on(&server.url()), &[&["inventory", "phone"], arguments].concat())
    };
    let run = |arguments: &[&str]| {
        let done = inventory(arguments);
        assert_eq!(status(&done), 0, "{arguments:?}: {}", stderr_of(&done));
        printed(&done)
    };
    let refused = |arguments: &[&str]| {
        let done = inventory(arguments);
        assert_ne!(status(&done), 0, "{arguments:?}: {}", printed(&done));
        stderr_of(&done)
    };
    run(&[
        "create",
        "--stock",
        "10",
        "--journal",
        "100",
        "--closes-at",
        "2099-11-11T20:00:00+08:00",
    ]);
    let shop = client(&server).await;
    let sale = Inventory::open(&shop, "phone").await.expect("a sale");
    let buy = async |id: &str| sale.deduct(1).operation(id).send().await.expect("an answer");

    assert!(run(&["pause"]).contains("paused"));
    assert_eq!(buy("a").await, Deduction::Paused);
    assert!(run(&["resume"]).contains("selling"));
    assert!(matches!(buy("a").await, Deduction::Taken(_)));
    assert!(
        run(&["window", "--opens-at", "2099-01-01T00:00:00Z"])
            .contains("closes at 2099-11-11T12:00:00Z")
    );
    assert!(matches!(buy("b").await, Deduction::NotStarted { .. }));
    let millis = refused(&["window", "--opens-at", "1794398400000"]);
    assert!(millis.contains("+08:00"), "{millis}");
    refused(&["window"]);
    run(&["window", "--opens-at", "none", "--closes-at", "none"]);
    assert!(matches!(buy("b").await, Deduction::Taken(_)));
    run(&["limit", "1"]);
    assert!(sale.deduct(1).operation("c").send().await.is_err(), "it names no buyer");
    run(&["limit", "none"]);
    for _ in 0..2 {
        assert_eq!(run(&["restock", "5", "--id", "delivery"]).trim(), "added 5");
    }
    assert!(run(&["resize", "3"]).contains("3 segments"));

    assert!(run(&["lookup", "a"]).contains("sold, 1 units"));
    let absent = refused(&["lookup", "never"]);
    assert!(absent.contains("nothing is on record of `never`"), "{absent}");
    assert!(matches!(buy("never").await, Deduction::Taken(_)), "a lookup leaves no trace");
    refused(&["cancel", "mistyped"]);
    assert!(matches!(buy("mistyped").await, Deduction::Taken(_)), "nor does a typing error");
    assert!(refused(&["cancel", "a"]).contains("refund a"));
    let held = sale.reserve(1).operation("held").send().await;
    assert!(matches!(held, Ok(Reservation::Held(_))), "{held:?}");
    assert!(run(&["lookup", "held", "--json"]).contains("reserved"));
    assert_eq!(run(&["cancel", "held"]).trim(), "held: cancelled");
    let late = refused(&["refund", "older"]);
    assert!(late.contains("--receipt FILE") && !late.contains(".receipt("), "{late}");
    let journal = run(&["journal"]);
    assert!(journal.lines().count() >= 7 && journal.contains("restocked 5 delivery"), "{journal}");
    assert_eq!(run(&["journal", "--after", "1", "--limit", "2", "--json"]).lines().count(), 2);
    assert!(run(&["repair"]).contains("no home is missing"));

    let shown = refused(&["remove"]);
    assert!(shown.contains("nothing was deleted") && shown.contains("4 sold"), "{shown}");
    refused(&["remove", "--confirm", "other"]);
    assert_eq!(sale.stock().await.expect("it is there").sold, 4);
    assert_eq!(run(&["remove", "--confirm", "phone"]).trim(), "phone: removed");
    refused(&["remove", "--confirm", "phone"]);
    assert!(sale.stock().await.is_err());
}

/// A server of three came back empty: the commands of the runbook.
#[test]
fn a_sale_is_repaired_by_the_command() {
    let Some(servers) = independent(3) else { return };
    let ports: Vec<String> = servers.iter().map(RedisServer::url).collect();
    let rest = ports[1..].iter().map(|url| url.trim_start_matches("redis://"));
    let url = std::iter::once(ports[0].as_str()).chain(rest).collect::<Vec<_>>().join(",");
    let run = |arguments: &[&str]| {
        let done = output(&mut on(&url), &[&["inventory", "phone"], arguments].concat());
        assert_eq!(status(&done), 0, "{arguments:?}: {}", stderr_of(&done));
        printed(&done)
    };
    run(&["create", "--stock", "90", "--homes", "3"]);
    servers[1].cli(&["FLUSHALL"]);
    let lost = output(&mut on(&url), &["inventory", "phone"]);
    assert!(stderr_of(&lost).contains("`dlock inventory NAME repair`"), "{}", stderr_of(&lost));
    assert!(!stderr_of(&lost).contains("::"), "{}", stderr_of(&lost));
    let repaired = run(&["repair"]);
    assert!(repaired.contains("home 1") && repaired.contains("60 units"), "{repaired}");
    run(&["pause"]);
    run(&["restock", "30", "--id", "repair-1"]);
    let directory = tempfile::TempDir::new().expect("a directory");
    let orders = directory.path().join("orders.csv");
    let rows = "operation,quantity,state,at\no-1,2,sold,2026-11-11T20:00:00+08:00\no-2,1,sold,\n";
    std::fs::write(&orders, rows).expect("a file");
    let file = orders.to_str().expect("a path");
    let shown = output(&mut on(&url), &["inventory", "phone", "reconcile", "--orders", file]);
    assert_eq!(status(&shown), 1, "{}", stderr_of(&shown));
    assert!(printed(&shown).contains("o-1: missing by 2: sell it again"), "{}", printed(&shown));
    let applied = run(&["reconcile", "--orders", file, "--apply"]);
    assert!(applied.contains("o-1: missing by 2: sold again"), "{applied}");
    run(&["resume"]);
    let audit = run(&["audit"]);
    assert!(audit.contains("87 available, 0 reserved, 3 sold of 90"), "{audit}");
    assert!(audit.contains("every unit is accounted for"), "{audit}");
}

/// The exit status and the errors of a command whose output nobody reads.
fn unread(arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = on("memory://");
    command.args(arguments).stdout(std::process::Stdio::piped());
    let mut running =
        command.stderr(std::process::Stdio::piped()).spawn().expect("dlock can be run");
    drop(running.stdout.take());
    let done = running.wait_with_output().expect("its end");
    (done.status.code(), stderr_of(&done))
}

#[test]
fn a_reader_that_goes_away_ends_it_quietly() {
    for command in [
        &["watch", "--every", "50ms"][..],
        &["watch", "--every", "50ms", "--json"],
        &["ls"],
        &["health"],
        &["completions", "fish"],
        &["sale", "--stock", "10", "--buyers", "20", "--json"],
    ] {
        assert_eq!(unread(command), (Some(0), String::new()), "{command:?}");
    }
    let full = std::fs::File::options().write(true).open("/dev/full").expect("a full device");
    let lost = on("memory://").arg("health").stdout(full).output().expect("dlock can be run");
    assert_eq!(status(&lost), 1);
    assert!(stderr_of(&lost).contains("cannot be written"), "{}", stderr_of(&lost));
}

#[test]
fn errors_say_what_to_do() {
    let Some(server) = RedisServer::start() else { return };
    let nowhere = output(&mut on(&server.url()), &["inventory", "sale"]);
    assert_eq!(status(&nowhere), 1, "{}", stderr_of(&nowhere));
    assert!(
        stderr_of(&nowhere).contains("`dlock inventory NAME create`"),
        "{}",
        stderr_of(&nowhere)
    );
    let wrong = output(&mut dlock(), &["ls", "--url", "zookeper://h"]);
    assert_eq!(status(&wrong), 78);
    assert!(stderr_of(&wrong).contains("redis://"), "{}", stderr_of(&wrong));
    let empty = output(&mut dlock(), &["show", "", "--url", "memory://"]);
    assert_eq!(status(&empty), 64, "{}", stderr_of(&empty));
    assert_eq!(status(&output(&mut dlock(), &["run", "k"])), 2, "no program");
    for command in ["sale", "run", "ls", "show", "break", "inventory", "watch", "bench", "health"] {
        let help = output(&mut dlock(), &[command, "--help"]);
        assert_eq!(status(&help), 0);
        assert!(printed(&help).contains(&format!("dlock {command} ")), "{command} has no example");
    }
    let completions = printed(&output(&mut dlock(), &["completions", "bash"]));
    assert!(completions.contains("_dlock()"), "bash would not know it");
}
