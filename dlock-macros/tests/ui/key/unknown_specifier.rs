use dlock::key;

fn main() {
    let order = 7;
    let _ = key!("{order:id}");
}
