//! Checks that the files and metrics that the documents name exist.

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The source files under a folder, one after the other.
fn sources(folder: &str) -> String {
    let entries = std::fs::read_dir(root().join(folder)).expect("the folder");
    let mut all = String::new();
    for entry in entries {
        let entry = entry.expect("an entry");
        let path = format!("{folder}/{}", entry.file_name().to_string_lossy());
        if entry.path().is_dir() {
            all += &sources(&path);
        } else if path.ends_with(".rs") {
            all += &read(&path);
        }
    }
    all
}

/// The words of a document that look like the name of a metric of dlock.
fn metrics(text: &str) -> Vec<&str> {
    let words = text.split(|c: char| !c.is_ascii_lowercase() && c != '_');
    let ends = ["_total", "_seconds", "_seconds_bucket"];
    words
        .filter(|word| word.starts_with("dlock_") && ends.iter().any(|end| word.ends_with(end)))
        .collect()
}

#[test]
fn dashboards_and_alerts_show_metrics_that_exist() {
    let source = sources("dlock-core/src") + &sources("dlock-segment/src");
    let known: Vec<&str> = metrics(&source);
    for path in ["grafana-dashboard.json", "prometheus-rules.yaml"] {
        let text = read(&format!("docs/observability/{path}"));
        let used = metrics(&text);
        assert!(used.len() > 5, "{path} shows nothing");
        for name in used {
            let name = name.trim_end_matches("_bucket");
            assert!(known.contains(&name), "{path}: {name} does not exist");
        }
    }
    let dashboard: Result<serde_json::Value, _> =
        serde_json::from_str(&read("docs/observability/grafana-dashboard.json"));
    assert!(dashboard.is_ok(), "{dashboard:?}");
}

#[test]
fn links_lead_somewhere() {
    let mut documents = vec!["README.md".to_owned(), "README.zh.md".to_owned()];
    for entry in std::fs::read_dir(root().join("docs")).expect("the documents") {
        let name = entry.expect("a document").file_name().to_string_lossy().into_owned();
        if name.ends_with(".md") {
            documents.push(format!("docs/{name}"));
        }
    }
    for document in documents {
        let text = read(&document);
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let path = link.split('#').next().unwrap_or_default();
            if path.is_empty() || path.contains("://") || path.contains(' ') {
                continue;
            }
            let target = root().join(&document).with_file_name("").join(path);
            assert!(target.exists(), "{document}: {link} leads nowhere");
        }
    }
}
