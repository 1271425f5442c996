//! A headless Chromium, controlled through the pipe of its debugging protocol: JSON
//! messages that each end with a zero byte.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use serde_json::{Value, json};

/// How long the browser may take for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// A page in a browser; closed when dropped.
pub(crate) struct Page {
    process: Child,
    directory: PathBuf,
    requests: File,
    messages: mpsc::Receiver<Value>,
    session: Option<String>,
    last: u64,
    /// The messages on the console of the page, and the errors of its script.
    pub(crate) console: Vec<String>,
}

impl Page {
    /// Opens a URL, or `None` if there is no Chromium; see
    /// [`found`](dlock_testkit::servers::found).
    pub(crate) fn open(url: &str) -> Option<Self> {
        let version = Command::new("chromium").arg("--version").output();
        let is_there = version.is_ok_and(|it| it.status.success());
        if !dlock_testkit::servers::found("chromium", is_there) {
            return None;
        }
        let directory = std::env::temp_dir().join(format!("dlock-page-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory for the browser");
        let (to, from) = (directory.join("to"), directory.join("from"));
        let made = Command::new("mkfifo").args([&to, &from]).status();
        assert!(made.expect("mkfifo can be run").success());
        let process = Command::new("sh")
            .arg("-c")
            .arg(
                "exec chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage \
                 --disable-extensions --no-first-run --disable-background-networking \
                 --remote-debugging-pipe --user-data-dir=\"$2\" 3<\"$0\" 4>\"$1\"",
            )
            .args([&to, &from, &directory.join("profile")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("a shell");
        let requests = File::options().write(true).open(&to).expect("the browser reads");
        let answers = BufReader::new(File::open(&from).expect("the browser writes"));
        let (sender, messages) = mpsc::channel();
        std::thread::spawn(move || {
            for message in answers.split(0).map_while(Result::ok) {
                let Ok(message) = serde_json::from_slice(&message) else { continue };
                if sender.send(message).is_err() {
                    return;
                }
            }
        });
        let mut page = Page {
            process,
            directory,
            requests,
            messages,
            session: None,
            last: 0,
            console: Vec::new(),
        };
        let target = page.call("Target.createTarget", json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = page.call("Target.attachToTarget", attach);
        page.session = session["sessionId"].as_str().map(ToOwned::to_owned);
        page.call("Runtime.enable", json!({}));
        page.call("Log.enable", json!({}));
        page.call("Page.navigate", json!({ "url": url }));
        Some(page)
    }

    /// Evaluates an expression in the page.
    pub(crate) fn value(&mut self, expression: &str) -> Value {
        let parameters = json!({ "expression": expression, "returnByValue": true });
        self.call("Runtime.evaluate", parameters)["result"]["value"].clone()
    }

    fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.last += 1;
        let mut request = json!({ "id": self.last, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            request["sessionId"] = session.as_str().into();
        }
        write!(self.requests, "{request}\0").expect("the browser reads");
        loop {
            let message = self.messages.recv_timeout(ANSWER_TIMEOUT).expect("the browser answers");
            if message["id"] == self.last {
                assert!(message.get("error").is_none(), "{method}: {message}");
                return message["result"].clone();
            }
            let event = message["method"].as_str().unwrap_or_default();
            if matches!(
                event,
                "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Log.entryAdded"
            ) {
                self.console.push(message.to_string());
            }
        }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        let _ = write!(self.requests, "{}\0", json!({ "id": 0, "method": "Browser.close" }));
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
