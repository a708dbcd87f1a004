"""How ranks of drawn scripts lie on hosts: by their number, ranks of each host; "" for one host."""

LAYOUTS = {1: [""], 2: ["", "1+1"], 3: ["", "2+1", "1+1+1"]}
