use dlock::key;

fn main() {
    let name = "order:7";
    let _ = key!(name);
}
