//! The command on a real Consul, and how it shares locks with `consul lock`.
#![cfg(feature = "consul")]

mod support;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dlock_testkit::consul::ConsulServer;
use support::{PROGRAM, json, on, output, printed, status, stderr_of, until};

/// Looks from outside whether two programs are inside at the same time: each makes a
/// directory that cannot be made twice.
struct Detector {
    directory: PathBuf,
    script: String,
}

impl Detector {
    fn new(name: &str) -> Self {
        let directory = format!("dlock-consul-{name}-{}", std::process::id());
        let directory = std::env::temp_dir().join(directory);
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(&directory).expect("a directory");
        let at = directory.display();
        let script = format!(
            "mkdir {at}/inside 2>/dev/null || echo $1 >> {at}/overlaps; echo $1 >> {at}/entries; \
             sleep 0.02; rmdir {at}/inside 2>/dev/null; true"
        );
        Detector { directory, script }
    }

    fn count(&self, file: &str, of: &str) -> usize {
        let text = std::fs::read_to_string(self.directory.join(file)).unwrap_or_default();
        text.lines().filter(|line| line.starts_with(of)).count()
    }

    /// Runs a program again and again until it is told to stop.
    fn repeat(&self, stop: &AtomicBool, mut program: impl FnMut(&str) -> Command) {
        while !stop.load(Ordering::Relaxed) {
            let mut command = program(&self.script);
            let _ = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
        }
    }
}

impl Drop for Detector {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn with_consul(server: &ConsulServer, script: &str) -> Command {
    server.command(&["lock", "-shell=false", "contended", "sh", "-c", script, "sh", "consul"])
}

fn with_dlock(url: &str, script: &str) -> Command {
    let mut command = on(url);
    command.args(["run", "--wait", "30s", "contended", "--", "sh", "-c", script, "sh", "dlock"]);
    command
}

/// Six seconds of contention between `dlock run` and `consul lock`; every second a `dlock
/// run` is killed while it waits or holds.
#[test]
fn dlock_run_and_consul_lock_exclude_each_other() {
    let Some(server) = ConsulServer::start() else { return };
    let detector = Detector::new("exclude");
    let url = server.url();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| detector.repeat(&stop, |script| with_consul(&server, script)));
            scope.spawn(|| detector.repeat(&stop, |script| with_dlock(&url, script)));
        }
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let mut child = Command::new(PROGRAM)
                    .args(["run", "--wait", "30s", "contended", "--"])
                    .args(["sh", "-c", &detector.script, "sh", "killed"])
                    .env("DLOCK_URL", &url)
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .spawn()
                    .expect("dlock can be run");
                std::thread::sleep(Duration::from_millis(900));
                let _ = child.kill();
                let _ = child.wait();
            }
        });
        std::thread::sleep(Duration::from_secs(6));
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(detector.count("overlaps", ""), 0, "never two at a time");
    let (dlock, consul) = (detector.count("entries", "dlock"), detector.count("entries", "consul"));
    assert!(dlock > 0 && consul > 0, "both get their turns: dlock {dlock}, consul {consul}");
    // What the killed ones had is given back when their sessions end.
    until("nothing is left", || server.keys().is_empty());
}

/// The negative control: the same without the lock on one side.
#[test]
fn the_detector_finds_a_side_without_a_lock() {
    let Some(server) = ConsulServer::start() else { return };
    let detector = Detector::new("control");
    let url = server.url();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| detector.repeat(&stop, |script| with_dlock(&url, script)));
        scope.spawn(|| {
            detector.repeat(&stop, |script| {
                let mut command = Command::new("sh");
                command.args(["-c", script, "sh", "unlocked"]);
                command
            });
        });
        let began = Instant::now();
        while detector.count("overlaps", "") == 0 && began.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(20));
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(detector.count("overlaps", "") > 0);
}

/// Starts a program that prints `ready` to a file when it is inside.
fn holding(mut command: Command, directory: &Path) -> Child {
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it runs");
    until("it holds the lock", || directory.join("ready").exists());
    child
}

#[test]
fn each_sees_the_lock_of_the_other() {
    let Some(server) = ConsulServer::start() else { return };
    let detector = Detector::new("sees");
    let ready = detector.directory.join("ready");
    let script = format!("touch {}; sleep 30", ready.display());
    // `consul lock` holds: dlock names it.
    let held = server.command(&["lock", "-shell=false", "job", "sh", "-c", &script]);
    let mut child = holding(held, &detector.directory);
    let busy = output(&mut on(&server.url()), &["run", "--wait", "500ms", "job", "--", "true"]);
    assert_eq!(status(&busy), 75, "{}", stderr_of(&busy));
    assert!(stderr_of(&busy).contains("Consul lock for"), "{}", stderr_of(&busy));
    let shown = json(&output(&mut on(&server.url()), &["show", "job", "--json"]));
    let name = shown[0]["holders"][0]["name"].as_str().unwrap_or_default();
    assert!(name.starts_with("Consul lock for"), "{shown:?}");
    let listed = printed(&output(&mut on(&server.url()), &["ls"]));
    assert!(listed.contains("job"), "{listed}");
    // It gives way to SIGTERM in order, and `dlock break` takes it from one that does not.
    let broken = output(&mut on(&server.url()), &["break", "job", "--yes"]);
    assert_eq!(status(&broken), 0, "{}", stderr_of(&broken));
    until("consul lock has noticed", || matches!(child.try_wait(), Ok(Some(_))));
    let _ = std::fs::remove_file(&ready);

    // dlock holds: `consul lock` waits in vain.
    let mut held = on(&server.url());
    held.args(["run", "job", "--", "sh", "-c", &script]);
    let mut child = holding(held, &detector.directory);
    let tried = server.run(&["lock", "-try=1s", "-shell=false", "job", "true"]);
    assert!(tried.is_err(), "{tried:?}");
    // The holder dies: its session ends by itself, and `consul lock` gets the lock.
    let _ = child.kill();
    let _ = child.wait();
    let killed = output(&mut on(&server.url()), &["ls", "--json"]);
    assert_eq!(status(&killed), 0, "{}", stderr_of(&killed));
    server.run(&["lock", "-try=20s", "-shell=false", "job", "true"]).expect("the lock");
}

#[test]
fn health_and_bench_work() {
    let Some(server) = ConsulServer::start() else { return };
    let health = output(&mut on(&server.url()), &["health"]);
    assert_eq!(status(&health), 0, "{}", stderr_of(&health));
    let bench = output(&mut on(&server.url()), &["bench", "lock", "--duration", "1s", "--json"]);
    assert_eq!(status(&bench), 0, "{}", stderr_of(&bench));
}
